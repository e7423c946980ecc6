#pragma once

#include <memory>

#include <torch/types.h>

namespace tessera::memory {

/// Smaller gradients are copied instead.
inline constexpr size_t kMinPlacementBytes = 64 << 10;

/// A source of tensor memory that is asked before the heap.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// Memory for a tensor of `bytes` >= kMinPlacementBytes: from this source, or from `heap`.
  virtual at::DataPtr serve(size_t bytes, at::Allocator& heap) = 0;
};

/// CPU tensor allocations on this thread go to `source` first, while it is alive. The first call in
/// a process installs an allocator in front of libtorch's. An allocator that the program installs
/// with higher priority, or later, takes precedence, and `source` is then not used.
void set_memory_source(std::weak_ptr<MemorySource> source);
/// The source of this thread; null if there is none.
std::shared_ptr<MemorySource> memory_source();

/// The memory of `owner` (contiguous, on the CPU) as the memory of another tensor. `owner` is kept
/// alive and counts as occupied while that tensor is alive. Returns a null pointer if it is
/// occupied already. Thread-safe.
at::DataPtr place_in(const at::Tensor& owner);
/// True if another tensor uses the memory of `owner`.
bool is_placed(const at::Tensor& owner);

}  // namespace tessera::memory
