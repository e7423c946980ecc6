#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/shm/shm_process.h"

namespace tessera::comm {

/// Where a peer finds a segment: enough to open it and to be sure that it is the right one. Plain
/// bytes.
struct SegmentCard {
  int32_t pid = 0;
  int32_t fd = -1;  ///< -1: there is none.
  uint64_t start_time = 0;
  uint64_t nonce = 0;
  uint64_t bytes = 0;  ///< Of data.
  uint64_t huge = 0;   ///< The leading bytes of the file that are in huge pages.
};

/// A run of memory that several processes map. It has no name: it ends with the last process that
/// maps it, however that ends, and the size of /dev/shm does not bound it.
class SharedSegment {
 public:
  /// Zero-filled memory, all of it reserved and present. `copies`: how many such segments are about
  /// to be made on this host, for the check that memory suffices. Throws std::runtime_error with
  /// the reason.
  static std::shared_ptr<SharedSegment> create(size_t bytes, int copies);
  /// Maps a peer's segment while the peer keeps it open. Throws std::runtime_error with the reason.
  /// A segment made by this very process is not mapped twice.
  static std::shared_ptr<SharedSegment> open(const SegmentCard& card);

  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  std::byte* data() const;
  size_t bytes() const { return card_.bytes; }
  const SegmentCard& card() const { return card_; }
  /// Whether forget() does anything: of a peer's memory in huge pages. In small ones, coming back
  /// would cost as much as a copy.
  bool forgets() const { return base_ != nullptr && !own_ && card_.huge > 0; }
  /// Lets go of what this process has mapped of [from, from + bytes), and somewhat around it, so
  /// that a peer's memory does not count as this process's own. The data stay where they are, and
  /// are there again when they are next read or written.
  void forget(const std::byte* from, size_t bytes) const;
  /// Nobody else can map it from now on. Call it once all peers have.
  void close_file();

 private:
  SharedSegment() = default;
  void map(int fd, bool now);

  SegmentCard card_;
  bool own_ = false;      // of this very process
  void* room_ = nullptr;  // addresses set aside
  size_t room_bytes_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace tessera::comm
