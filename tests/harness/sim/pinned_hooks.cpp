// Lets libtorch 1.13 make pinned memory (TensorOptions::pinned_memory) for the simulated device. It
// knows CUDA's pinned memory alone, and asks CUDA's hooks for it.
#include "harness/sim/memory.h"
#include "tessera/detail/torch_compat.h"
#if !TESSERA_TORCH_AT_LEAST(2, 0)
#include <ATen/detail/CUDAHooksInterface.h>

namespace tessera::sim {
namespace {

struct PinnedHooks final : at::CUDAHooksInterface {
  explicit PinnedHooks(at::CUDAHooksArgs) {}
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(void* data) const override { return is_pinned(data); }
};

}  // namespace
}  // namespace tessera::sim

namespace at {
using tessera::sim::PinnedHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PinnedHooks);
}  // namespace at
#endif
