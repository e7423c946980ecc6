#pragma once

#include <vector>

#include <torch/torch.h>

#include "tessera/process_group.h"

namespace tessera::fsdp {

/// Memory that is used again and again for one purpose: fresh memory costs an order of magnitude
/// more than a rewrite. Slots of one capacity, dtype and device; in shared memory where the group
/// has it, so that peers read in place. Ranks take and give in the same order: the n-th slot is
/// everyone's n-th.
class SlotPool {
 public:
  SlotPool(ProcessGroup group, int64_t capacity, at::TensorOptions options)
      : group_(std::move(group)), capacity_(capacity), options_(options) {}

  /// The first `numel` elements of a free slot, with unspecified contents. May be collective.
  at::Tensor take(int64_t numel);
  /// `keeps_pages` false: its memory goes back to the system until it is taken again.
  void give(const at::Tensor& slot, bool keeps_pages = true);

 private:
  ProcessGroup group_;
  int64_t capacity_;
  at::TensorOptions options_;
  std::vector<at::Tensor> slots_, free_;
};

}  // namespace tessera::fsdp
