#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/shm/shm_process.h"

namespace tessera::comm {

/// The values by which a peer opens a segment and checks that it is the right one. Trivially
/// copyable.
struct SegmentCard {
  int32_t pid = 0;
  int32_t fd = -1;  ///< -1: there is no segment.
  uint64_t start_time = 0;
  uint64_t nonce = 0;
  uint64_t bytes = 0;  ///< Size of the data.
  uint64_t huge = 0;   ///< Number of leading bytes of the file that are in huge pages.
};

/// Memory that several processes map (memfd). It has no name in the file system. The system frees
/// it when the last process that maps it has ended, in whatever way, and the size of /dev/shm does
/// not limit it.
class ShmSegment {
 public:
  static constexpr int64_t huge_bytes = 2 << 20;  ///< Size of a huge page.

  /// Makes a zero-filled segment. All its memory is reserved and present. `copies`: the number of
  /// such segments that this host makes now, to check that memory suffices. Throws
  /// std::runtime_error with the reason.
  static std::shared_ptr<ShmSegment> create(size_t bytes, int copies);
  /// Maps a peer's segment while the peer keeps its file open. A segment made by this process is
  /// not mapped again. Throws std::runtime_error with the reason.
  static std::shared_ptr<ShmSegment> open(const SegmentCard& card);

  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  std::byte* data() const;
  size_t bytes() const { return card_.bytes; }
  const SegmentCard& card() const { return card_; }
  /// True if forget() has an effect: for a peer's memory in huge pages. With small pages, mapping
  /// the memory again would cost as much as a copy.
  bool forgets() const { return base_ != nullptr && !own_ && card_.huge > 0; }
  /// Unmaps the pages of [from, from + bytes), rounded outwards to huge pages, from this process,
  /// so that a peer's memory does not count as its own. The data are not changed, and the next
  /// access maps them again.
  void forget(const std::byte* from, size_t bytes) const;
  /// Closes the file; no other process can map the segment afterwards. Call it when all peers have
  /// mapped it.
  void close_file();

 private:
  ShmSegment() = default;
  void map(int fd);
  void map_at(std::byte* base, int fd, int flags);

  SegmentCard card_;
  bool own_ = false;          // made by this process
  void* reserved_ = nullptr;  // the reserved range of addresses that holds base_
  size_t reserved_bytes_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace tessera::comm
