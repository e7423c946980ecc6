#pragma once

#include <memory>

#include <torch/torch.h>

namespace tessera::memory {

/// What is smaller is copied.
inline constexpr size_t kMinPlacementBytes = 64 << 10;

/// Where tensors get their memory instead of from the heap.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// `bytes` >= kMinPlacementBytes; from `heap` where this one has nothing to lend.
  virtual at::DataPtr serve(size_t bytes, at::Allocator& heap) = 0;
};

/// Whatever this thread wants for tensors on CPUs is asked of `source` first, while that lives. The
/// first call in a process puts an allocator before libtorch's; one that the program has given
/// precedence, or sets later, is left in its place, and nobody is asked.
void set_memory_source(std::weak_ptr<MemorySource> source);
/// Who is asked first in this thread.
std::shared_ptr<MemorySource> memory_source();

/// The memory of `owner`, which is contiguous and on a CPU, for another tensor: it is lent while a
/// tensor made of it lives, and kept so long. Nothing where it is lent already. Any thread.
at::DataPtr place_in(const at::Tensor& owner);
bool is_placed(const at::Tensor& owner);

}  // namespace tessera::memory
