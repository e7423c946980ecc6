#pragma once

#include <vector>

#include <torch/types.h>

#include "tessera/process_group.h"

namespace tessera::fsdp {

/// A pool of reusable buffers, called slots, of one capacity, dtype and device. Writing to fresh
/// memory costs an order of magnitude more than writing to memory in use. Slots are in memory
/// that the ranks of a host share, if the group has it, so that they read them without a copy. All
/// ranks must take and give slots in the same order; then the n-th slot of one rank corresponds to
/// the n-th of every other.
class SlotPool {
 public:
  SlotPool(ProcessGroup group, int64_t capacity, at::TensorOptions options)
      : group_(std::move(group)), capacity_(capacity), options_(options) {}

  /// Returns the first `numel` elements of a free slot; their values are unspecified. Makes a new
  /// slot if none is free, which is collective for memory of the CPU.
  at::Tensor take(int64_t numel);
  /// Memory outside of the pool, which give() frees. Local.
  at::Tensor take_private(int64_t numel) const;
  /// Makes `slot` free again. With `keeps_pages` false its memory is returned to the system until
  /// the slot is taken again.
  void give(const at::Tensor& slot, bool keeps_pages = true);
  /// After ranks have given slots in different orders: the order of the free ones is that in which
  /// they were made.
  void sort_free();
  /// Returns the memory of all free slots to the system until they are taken again.
  void return_pages_of_free();
  /// Other tensors use the memory of `slot` at `occupied`, by a wrong prediction (see [Note:
  /// gradients in place]). Returns private memory of the same size, which takes the slot's place
  /// until it is given back and those tensors are gone. Collectives then copy. Local.
  at::Tensor displace(const at::Tensor& slot, std::vector<at::Tensor> occupied);

 private:
  struct Displaced {
    at::Tensor home, substitute;
    std::vector<at::Tensor> occupied;
  };

  std::vector<at::Tensor>::iterator find(const at::Tensor& slot);  // the end: not of the pool
  /// `slot` is free: its home takes its place again if no other tensor uses it.
  void restore(at::Tensor& slot);

  ProcessGroup group_;
  int64_t capacity_;
  at::TensorOptions options_;
  std::vector<at::Tensor> slots_, free_;
  std::vector<Displaced> displaced_;
};

}  // namespace tessera::fsdp
