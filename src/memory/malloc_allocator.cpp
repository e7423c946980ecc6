#include "memory/malloc_allocator.h"

#include <cstdlib>

#ifdef __GLIBC__

#include <cstdint>

#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <dlfcn.h>
#include <gnu/libc-version.h>

#include "tessera/detail/torch_compat.h"

namespace tessera::memory {
namespace {

/// The address of malloc's block, stored just before the aligned memory. In a block that libtorch
/// has allocated itself, this word is malloc's own: the size of the block.
void*& block_of(void* memory) { return static_cast<void**>(memory)[-1]; }

void release(void* memory) {
  if (memory == nullptr) return;
  void* const block = block_of(memory);
  const auto before = reinterpret_cast<uintptr_t>(memory) - reinterpret_cast<uintptr_t>(block);
  std::free(before >= sizeof block && before < sizeof block + c10::gAlignment ? block : memory);
}

class MallocAllocator final : public compat::Allocator {
 public:
  explicit MallocAllocator(at::Allocator* base) : base_(base) {}

  at::DataPtr serve(size_t bytes) const override {
    // libtorch's own allocator reports to the profiler, and reports a failed allocation.
    if (bytes == 0 || c10::memoryProfilingEnabled()) return base_->allocate(bytes);
    void* const block = std::malloc(bytes + sizeof(void*) + c10::gAlignment - 1);
    if (block == nullptr) return base_->allocate(bytes);
    auto* const memory = reinterpret_cast<void*>(
        (reinterpret_cast<uintptr_t>(block) + sizeof(void*) + c10::gAlignment - 1) /
        c10::gAlignment * c10::gAlignment);
    block_of(memory) = block;
    return {memory, memory, &release, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }

 private:
  at::Allocator* base_;
};

/// False if malloc is preloaded or a sanitizer's.
bool malloc_is_glibcs() {
  Dl_info malloc_is{}, libc_is{};
  void* const symbol = dlsym(RTLD_DEFAULT, "malloc");
  return symbol && dladdr(symbol, &malloc_is) &&
         dladdr(reinterpret_cast<void*>(&gnu_get_libc_version), &libc_is) &&
         malloc_is.dli_fbase == libc_is.dli_fbase;
}

}  // namespace

bool use_malloc_for_tensors() {
  static const bool done = [] {
    auto* const base = c10::GetAllocator(at::kCPU);
    if (base != c10::GetDefaultCPUAllocator() || !malloc_is_glibcs()) return false;
    c10::SetAllocator(at::kCPU, new MallocAllocator(base));
    return true;
  }();
  return done;
}

}  // namespace tessera::memory

#else

namespace tessera::memory {
bool use_malloc_for_tensors() { return false; }
}  // namespace tessera::memory

#endif
