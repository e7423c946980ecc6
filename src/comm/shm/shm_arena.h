#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "comm/shm/shm_segment.h"

namespace tessera::comm {

/// The memory of one allocate() call: the segments of all ranks, mapped by this rank.
struct ShmAllocation {
  int64_t id = 0;  ///< The same on all ranks.
  int rank = 0;
  std::vector<std::shared_ptr<ShmSegment>> segments;

  std::byte* data(int r) const { return segments[r]->data(); }
  /// True if all ranks have one segment in common.
  bool common() const { return segments.size() > 1 && segments[0] == segments[1]; }
};

/// Knows which tensors lie in memory that some ranks share. Groups of the same ranks may have one
/// arena in common. A tensor made from an allocation keeps it mapped; the arena does not.
/// Thread-safe.
class ShmArena {
 public:
  /// The first of the numbers for one group's allocations. No other group gets this number or those
  /// that follow it. The same on all ranks, which make their groups in the same order.
  int64_t begin_numbers();
  struct Place {
    std::shared_ptr<const ShmAllocation> allocation;
    int64_t offset = 0;  ///< Bytes from the start of this rank's segment.
  };

  /// Returns a 1-D tensor over the whole of this rank's segment, and adds it to those that find()
  /// knows.
  at::Tensor adopt(std::shared_ptr<const ShmAllocation> allocation, int64_t numel,
                   at::TensorOptions options);
  /// The place of a contiguous tensor; nullopt unless all its bytes lie in one allocation.
  std::optional<Place> find(const at::Tensor& tensor) const;

 private:
  mutable std::mutex mutex_;
  int64_t groups_ = 0;
  std::map<const std::byte*, std::weak_ptr<const ShmAllocation>> by_start_;
};

/// A tensor at `offset` bytes in rank `r`'s segment; it keeps the allocation mapped.
at::Tensor tensor_at(const std::shared_ptr<const ShmAllocation>& allocation, int r, int64_t offset,
                     at::IntArrayRef sizes, at::TensorOptions options);

}  // namespace tessera::comm
