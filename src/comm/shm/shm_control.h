#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/base/transport.h"
#include "comm/shm/shm_process.h"

namespace tessera::comm {

/// The part of a rank's shared memory that shows its progress to the other ranks. Only the owner
/// writes it, except `sleepers` and `given_up_by`.
struct ControlBlock {
  enum Status : uint32_t { alive = 0, left = 1, failed = 2 };
  using Message = std::array<std::byte, 64>;

  /// The number of barriers that the owner has arrived at. A futex.
  alignas(64) std::atomic<uint32_t> arrivals{0};
  /// The number of threads that sleep on `arrivals`, or are about to.
  alignas(64) std::atomic<uint32_t> sleepers{0};
  alignas(64) std::atomic<uint32_t> status{alive};
  /// With status failed: 1 + the rank that the owner blamed; 0: none, the failure was its own.
  std::atomic<uint32_t> blamed{0};
  /// 1 + a rank that waited for the owner until the time-out and gave up; 0: none. That rank writes
  /// it.
  std::atomic<uint32_t> given_up_by{0};
  /// The owner's messages of its latest two arrivals. Other ranks may still read the earlier one.
  alignas(64) Message messages[2]{};
  /// The reason why the owner could not do its part of the operation of its latest message; or
  /// empty.
  char problem[512]{};
};

/// Barriers, small messages and failure detection between the ranks of one host. For a barrier each
/// rank sets a flag in its own memory. A waiting rank spins for some microseconds, then sleeps on a
/// futex and checks every 50 ms whether its peers are alive.
class ShmControl {
 public:
  struct Member {
    ControlBlock* block = nullptr;
    ProcessIdentity process;
  };

  ShmControl(int rank, std::vector<Member> members, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }
  ControlBlock& block(int rank) { return *members_[rank].block; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  void set_stopped_timeout(std::chrono::milliseconds timeout) { stopped_timeout_ = timeout; }
  /// Begins `operation`, whose name appears in messages. Throws BrokenWorldError when an earlier
  /// operation failed.
  void begin(std::string operation);

  /// Returns when all ranks have called it. Throws BrokenWorldError.
  void barrier();
  /// A barrier that returns the messages of all ranks in rank order.
  template <class T>
  std::vector<T> share(const T& mine);

  /// Ends this rank's participation. Peers that wait for it fail with an error that names it;
  /// others are not affected. A blocked call of this rank ends. From any thread.
  void leave() noexcept;
  /// As leave(), after a failure that this rank caused itself.
  void give_up() noexcept;
  /// True if `peer` has not arrived at the last barrier that this rank arrived at. From any thread.
  bool is_late(int peer) const noexcept;

 private:
  ControlBlock& mine() { return *members_[rank_].block; }
  void arrive() noexcept;
  bool arrived(int peer) const noexcept;
  void wait_for(int peer);
  void sleep_on(int peer, std::chrono::nanoseconds at_most) noexcept;
  void check_peers(int peer);
  std::vector<int> late_peers() const;
  [[noreturn]] void give_up_on(const std::vector<int>& late, const std::string& cause);
  void fail_if_given_up();
  std::vector<int> dead_peers() const;
  int root_cause(int suspect) const;
  void set_status(ControlBlock::Status status) noexcept;
  [[noreturn]] void fail(std::vector<int> suspects, const std::string& cause);

  int rank_;
  std::vector<Member> members_;
  std::atomic<std::chrono::milliseconds> timeout_, stopped_timeout_;
  int spins_;
  uint32_t round_ = 0;
  std::string operation_;
  std::atomic<bool> aborted_{false};
  std::string failure_;
  std::vector<int> failed_ranks_;
};

template <class T>
std::vector<T> ShmControl::share(const T& message) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(ControlBlock::Message));
  const uint32_t slot = (round_ + 1) & 1;
  std::memcpy(mine().messages[slot].data(), &message, sizeof(T));
  barrier();
  std::vector<T> all(members_.size());
  for (size_t r = 0; r < all.size(); ++r)
    std::memcpy(&all[r], members_[r].block->messages[slot].data(), sizeof(T));
  return all;
}

}  // namespace tessera::comm
