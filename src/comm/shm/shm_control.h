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

/// The part of a rank's shared memory in which it tells the others where it is. Only its owner
/// writes, `sleepers` apart.
struct ControlBlock {
  enum Status : uint32_t { alive = 0, left = 1, failed = 2 };
  using Message = std::array<std::byte, 64>;

  /// How many times the owner has arrived at a barrier. A futex.
  alignas(64) std::atomic<uint32_t> arrivals{0};
  /// How many threads sleep, or are about to, on `arrivals`.
  alignas(64) std::atomic<uint32_t> sleepers{0};
  alignas(64) std::atomic<uint32_t> status{alive};
  /// With status failed: 1 + the rank that the owner blamed; 0: nobody, it failed by itself.
  std::atomic<uint32_t> blamed{0};
  /// What the owner said at its latest two arrivals: the one before the latest may still be being
  /// read.
  alignas(64) Message messages[2]{};
  /// Why the owner could not do its part of what the latest message is about.
  char problem[512]{};
};

/// The ranks' meeting place: barriers, small messages, and who is still there. Barriers work on
/// flags that each rank sets in its own memory; waiting spins for some microseconds, then sleeps on
/// a futex and looks after the peers every 50 ms.
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
  /// Names the collective under way, for messages. Throws BrokenWorldError when an earlier one
  /// failed.
  void begin(std::string what);

  /// Nobody returns before everybody has called. Throws BrokenWorldError.
  void barrier();
  /// A barrier that hands everybody's message to everybody, in rank order.
  template <class T>
  std::vector<T> share(const T& mine);

  /// This rank will take part in nothing more. Peers that need it fail with its name; those that do
  /// not, do not notice. From any thread: a blocked call ends.
  void leave() noexcept;
  /// As leave(), after a failure on this rank that was not the others'.
  void give_up() noexcept;

 private:
  ControlBlock& mine() { return *members_[rank_].block; }
  void arrive() noexcept;
  bool arrived(int peer) const noexcept;
  void wait_for(int peer);
  void sleep_on(int peer, std::chrono::nanoseconds at_most) noexcept;
  void look_after(int peer);
  std::vector<int> dead_peers() const;
  int root_cause(int suspect) const;
  void set_status(ControlBlock::Status status) noexcept;
  [[noreturn]] void fail(std::vector<int> suspects, const std::string& cause);

  int rank_;
  std::vector<Member> members_;
  std::atomic<std::chrono::milliseconds> timeout_;
  int spins_;
  uint32_t round_ = 0;
  std::string what_;
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
