#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "comm/shm/shm_segment.h"

namespace tessera::comm {

/// The memory of one allocate() call: every rank's segment, as mapped by this rank.
struct ShmAllocation {
  int64_t id = 0;  ///< The same on all ranks.
  int rank = 0;
  std::vector<std::shared_ptr<SharedSegment>> segments;

  std::byte* data(int r) const { return segments[r]->data(); }
  /// One segment for all ranks.
  bool common() const { return segments.size() > 1 && segments[0] == segments[1]; }
};

/// Finds out which tensors lie in shared memory. A tensor made from an allocation keeps it mapped;
/// the arena does not.
class ShmArena {
 public:
  struct Place {
    std::shared_ptr<const ShmAllocation> allocation;
    int64_t offset = 0;  ///< Bytes from the start of this rank's segment.
  };

  /// A 1-D tensor over the whole of this rank's segment; from now on find() knows it.
  at::Tensor adopt(std::shared_ptr<const ShmAllocation> allocation, int64_t numel,
                   at::TensorOptions options);
  /// Where the bytes of a contiguous tensor are, when all of them are in one allocation.
  std::optional<Place> find(const at::Tensor& tensor) const;

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::weak_ptr<const ShmAllocation>> by_start_;
};

/// The tensor at `offset` bytes in rank `r`'s segment; it keeps the allocation mapped.
at::Tensor tensor_at(const std::shared_ptr<const ShmAllocation>& allocation, int r, int64_t offset,
                     at::IntArrayRef sizes, at::TensorOptions options);

}  // namespace tessera::comm
