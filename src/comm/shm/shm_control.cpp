#include "comm/shm/shm_control.h"

#include <algorithm>
#include <climits>
#include <ctime>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "comm/base/world.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto check_interval = 50ms;
constexpr int spins_on_own_processor = 1000;
// With fewer processors than ranks, spinning can keep the awaited rank from running.
constexpr int spins_on_shared_processor = 20;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) &&
              std::atomic<uint32_t>::is_always_lock_free);

// Not FUTEX_PRIVATE_FLAG, because the waiters are other processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds at_most) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
  timespec limit{};
  limit.tv_sec = seconds.count();
  limit.tv_nsec = (at_most - seconds).count();
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

ShmControl::ShmControl(int rank, std::vector<Member> members, std::chrono::milliseconds timeout)
    : rank_(rank),
      members_(std::move(members)),
      timeout_(timeout),
      stopped_timeout_(timeout),
      spins_(usable_processors() >= static_cast<int>(members_.size()) ? spins_on_own_processor
                                                                      : spins_on_shared_processor),
      round_(members_[rank].block->arrivals.load()) {}

void ShmControl::begin(std::string operation) {
  if (!failure_.empty()) throw BrokenWorldError(failure_, failed_ranks_);
  operation_ = std::move(operation);
}

void ShmControl::barrier() {
  if (!failure_.empty()) throw BrokenWorldError(failure_, failed_ranks_);
  arrive();
  for (int step = 1; step < size(); ++step) wait_for((rank_ + step) % size());
}

void ShmControl::arrive() noexcept {
  auto& block = mine();
  // Sequentially consistent, as is the count of sleepers: at least one of the two threads sees the
  // other's store.
  block.arrivals.store(++round_);
  if (block.sleepers.load() != 0) futex_wake_all(block.arrivals);
}

bool ShmControl::arrived(int peer) const noexcept {
  const uint32_t theirs = members_[peer].block->arrivals.load(std::memory_order_acquire);
  return static_cast<int32_t>(theirs - round_) >= 0;  // the counter may wrap around
}

bool ShmControl::is_late(int peer) const noexcept {
  const uint32_t own = members_[rank_].block->arrivals.load();
  return static_cast<int32_t>(members_[peer].block->arrivals.load() - own) < 0;
}

void ShmControl::wait_for(int peer) {
  for (int spin = 0; spin < spins_; ++spin) {
    if (arrived(peer)) return;
    pause();
  }
  const auto timeout = timeout_.load(), stopped_timeout = stopped_timeout_.load();
  const auto begin = Clock::now();
  auto next_check = begin + check_interval;
  auto stopped_for = 0ms;
  while (!arrived(peer)) {
    if (aborted_.load()) fail({}, "the process group was shut down on this rank");
    if (members_[peer].block->status.load() != ControlBlock::alive) check_peers(peer);
    const auto now = Clock::now();
    if (now >= next_check) {
      check_peers(peer);
      next_check = now + check_interval;
      // Counts checks and not time, because this rank may have been stopped with its peer.
      const bool stopped = stopped_timeout < timeout && is_stopped(members_[peer].process);
      stopped_for = stopped ? stopped_for + check_interval : 0ms;
      if (stopped && stopped_for >= stopped_timeout)
        give_up_on({peer}, fmt::format("has been stopped for {} ms", stopped_timeout.count()));
    }
    if (now - begin >= timeout) {
      const auto late = late_peers();
      if (late.empty()) return;
      give_up_on(late, fmt::format("did not arrive within {} ms", timeout.count()));
    }
    sleep_on(peer, std::min<std::chrono::nanoseconds>(next_check - now, begin + timeout - now));
  }
}

std::vector<int> ShmControl::late_peers() const {
  std::vector<int> late;
  for (int r = 0; r < size(); ++r)
    if (r != rank_ && !arrived(r)) late.push_back(r);
  return late;
}

void ShmControl::give_up_on(const std::vector<int>& late, const std::string& cause) {
  fail_if_given_up();
  // A late rank that continues finds this even when the others have ended.
  for (const int r : late) members_[r].block->given_up_by.store(static_cast<uint32_t>(rank_) + 1);
  fail(late, cause);
}

void ShmControl::sleep_on(int peer, std::chrono::nanoseconds at_most) noexcept {
  auto& block = *members_[peer].block;
  block.sleepers.fetch_add(1);
  const uint32_t seen = block.arrivals.load();
  const bool wait = static_cast<int32_t>(seen - round_) < 0 &&
                    block.status.load() == ControlBlock::alive && !aborted_.load();
  if (wait) futex_wait(block.arrivals, seen, std::max<std::chrono::nanoseconds>(at_most, 1us));
  block.sleepers.fetch_sub(1);
}

// Throws if a peer has not arrived and never will. A rank that the others gave up on blames itself.
// Dead ranks are blamed before ranks that gave up because of them.
void ShmControl::check_peers(int peer) {
  fail_if_given_up();
  const auto missing = [this](int r) { return r != rank_ && !arrived(r); };
  auto dead = dead_peers();
  std::erase_if(dead, [&](int r) { return !missing(r); });
  if (!dead.empty()) fail(dead, dead.size() == 1 ? "has died" : "have died");
  if (members_[peer].block->status.load() == ControlBlock::alive || !missing(peer)) return;
  const int root = root_cause(peer);
  const auto& block = *members_[root].block;
  std::string cause = "has left (an error there, or its process group was destroyed)";
  if (block.status.load() == ControlBlock::alive) {
    cause = is_alive(members_[root].process)
                ? fmt::format("did not arrive in time, as rank {} found", peer)
                : "has died";
  }
  fail({root}, cause);
}

// This rank was stopped, for example, and its peers have failed or ended because of that.
void ShmControl::fail_if_given_up() {
  const int by = static_cast<int>(mine().given_up_by.load()) - 1;
  if (by < 0) return;
  fail({rank_},
       fmt::format("is this one: rank {} gave up on it earlier (it was stopped, or late)", by));
}

std::vector<int> ShmControl::dead_peers() const {
  std::vector<int> dead;
  for (int r = 0; r < size(); ++r)
    if (r != rank_ && !is_alive(members_[r].process)) dead.push_back(r);
  return dead;
}

int ShmControl::root_cause(int suspect) const {
  std::set<int> seen;
  while (seen.insert(suspect).second) {
    const auto& block = *members_[suspect].block;
    // The owner writes `blamed` first.
    if (block.status.load() != ControlBlock::failed) break;
    const int next = static_cast<int>(block.blamed.load()) - 1;
    if (next < 0 || next == rank_ || next >= size()) break;
    suspect = next;
  }
  return suspect;
}

void ShmControl::fail(std::vector<int> ranks, const std::string& cause) {
  failed_ranks_ = std::move(ranks);
  failure_ =
      fmt::format("ProcessGroup (shm): rank {} of {} gave up in {}: ", rank_, size(), operation_);
  if (failed_ranks_.empty()) {
    failure_ += cause;
  } else {
    failure_ += fmt::format("{} {}", rank_list(failed_ranks_), cause);
    for (const int r : failed_ranks_) {
      failure_ += fmt::format("; rank {}: process {}, {} of {} barriers", r,
                              members_[r].process.pid, members_[r].block->arrivals.load(), round_);
    }
    mine().blamed.store(static_cast<uint32_t>(failed_ranks_.front()) + 1);
  }
  set_status(ControlBlock::failed);
  throw BrokenWorldError(failure_, failed_ranks_);
}

void ShmControl::set_status(ControlBlock::Status status) noexcept {
  uint32_t expected = ControlBlock::alive;
  mine().status.compare_exchange_strong(expected, status);
  futex_wake_all(mine().arrivals);
}

void ShmControl::leave() noexcept {
  set_status(ControlBlock::left);
  aborted_.store(true);
  for (auto& member : members_) futex_wake_all(member.block->arrivals);
}

void ShmControl::give_up() noexcept {
  if (failure_.empty()) {
    try {
      failure_ = fmt::format("ProcessGroup (shm): rank {} of {} cannot go on after its error in {}",
                             rank_, size(), operation_);
      failed_ranks_ = {rank_};
    } catch (...) {
    }
  }
  set_status(ControlBlock::failed);
}

}  // namespace tessera::comm
