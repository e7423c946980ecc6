// CUDA as the accelerator of a test program.
#include <cstdlib>

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "comm/base/world.h"
#include "comm/device/nccl_backend.h"
#include "harness/cuda/runtime_calls.h"
#include "harness/device/device.h"

namespace tessera::on_device {

c10::DeviceType type() { return at::kCUDA; }
std::string name() { return "cuda"; }
std::string backend_name() { return "nccl"; }
int devices() { return c10::impl::VirtualGuardImpl(type()).deviceCount(); }
bool has_kernels_of_cpu() { return false; }
int most_ranks() { return 2; }
unsigned seconds_of_a_rank() { return 240; }

at::Device device(int index) { return {type(), static_cast<c10::DeviceIndex>(index % devices())}; }

c10::Stream current_stream(int index) {
  return c10::impl::VirtualGuardImpl(type()).getStream(device(index));
}

void synchronize() {
  const c10::impl::VirtualGuardImpl guard(type());
  for (int i = 0; i < devices(); ++i) guard.synchronizeDevice(device(i).index());
}

at::Generator generator(int index) { return at::globalContext().defaultGenerator(device(index)); }

Stats stats() {
  const auto calls = cuda::runtime_calls();
  return {calls.launches, calls.waits, calls.waiting_functions};
}
void reset_stats() { cuda::reset_runtime_calls(); }

void start_rank(int rank, int world, uint64_t /*seed*/) {
  // Products in TF32 would differ from those of the CPU by more than rounding.
  at::globalContext().setAllowTF32CuBLAS(false);
  if (devices() >= world) return;
  // NCCL refuses two ranks of a host on one device. With hosts of their own they talk over a
  // socket.
  ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
}

std::shared_ptr<const comm::DeviceBackend> backend(bool exclusive) {
  if (exclusive) ::unsetenv("NCCL_HOSTID");
  return comm::nccl_backend(comm::World{});
}

}  // namespace tessera::on_device
