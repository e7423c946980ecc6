// Definitions in the program come before those of CUDA's library, for libtorch too. They count and
// call the library.
#include "harness/cuda/runtime_calls.h"

#include <mutex>

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace tessera::cuda {
namespace {

std::mutex mutex;
RuntimeCalls calls;

void count_wait(const char* function) {
  const std::lock_guard lock(mutex);
  ++calls.waits;
  calls.waiting_functions.insert(function);
}

void count_launch() {
  const std::lock_guard lock(mutex);
  ++calls.launches;
}

template <class Function>
Function* library_s(Function*, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

RuntimeCalls runtime_calls() {
  const std::lock_guard lock(mutex);
  return calls;
}

void reset_runtime_calls() {
  const std::lock_guard lock(mutex);
  calls = {};
}

}  // namespace tessera::cuda

using tessera::cuda::count_launch, tessera::cuda::count_wait, tessera::cuda::library_s;

#pragma GCC visibility push(default)
extern "C" {

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  static auto* const next = library_s(&cudaStreamSynchronize, __func__);
  count_wait(__func__);
  return next(stream);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  static auto* const next = library_s(&cudaEventSynchronize, __func__);
  count_wait(__func__);
  return next(event);
}

cudaError_t cudaDeviceSynchronize() {
  static auto* const next = library_s(&cudaDeviceSynchronize, __func__);
  count_wait(__func__);
  return next();
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  static auto* const next = library_s(&cudaMemcpy, __func__);
  count_wait(__func__);
  return next(to, from, bytes, kind);
}

// The call behind kernel<<<…>>>().
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  static auto* const next = library_s(&__cudaLaunchKernel, __func__);
  count_launch();
  return next(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  static auto* const next = library_s(&cudaLaunchKernelExC, __func__);
  count_launch();
  return next(config, kernel, arguments);
}

}  // extern "C"
#pragma GCC visibility pop
