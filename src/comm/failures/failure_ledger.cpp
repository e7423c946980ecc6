#include "comm/failures/failure_ledger.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "comm/base/call_with_timeout.h"
#include "comm/failures/failure_record.h"

namespace tessera::comm {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using Cause = FailureLedger::Cause;

/// True if another rank has waited for this one until the time-out, and the store did not answer it
/// afterwards. `serves`: this rank serves the store, and may not have read the notes of the ranks
/// that waited. `overdue`: this rank did not run for a while, and other ranks may have missed it.
bool has_kept_the_store_from_answering(const Waits& waits, bool serves, bool overdue) {
  if (!serves) return waits.on_this_rank();
  // A rank that was stopped between two collectives is not overdue. The store reads what has
  // arrived within milliseconds.
  const auto deadline = Clock::now() + std::chrono::milliseconds(overdue ? 1000 : 100);
  do {
    if (overdue ? waits.on_any() : waits.on_this_rank()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  } while (Clock::now() < deadline);
  return false;
}

/// True if another rank has waited for this one until the time-out and then blamed it. This rank
/// was stopped, for example, and its own record would come too late.
bool is_blamed(const Store& store, int rank, int size) {
  for (int other = 0; other < size; ++other) {
    const auto theirs = other == rank ? std::nullopt : read_failure(store, other);
    if (theirs && theirs->verdict && std::count(theirs->blamed.begin(), theirs->blamed.end(), rank))
      return true;
  }
  return false;
}

struct Trail {
  std::vector<int> ends;  ///< The ranks to blame, ascending.
  bool closed = false;    ///< It always ends: in a circle of records, or at damaged data.
  bool damage = false;
};

/// Follows the records from `mine` to the ranks that have none. In a circle, the rank that gave up
/// last is to blame: the others missed it before it missed any rank. Damaged data end it at once.
Trail follow(const Store& store, int rank, const FailureRecord& mine) {
  std::map<int, int64_t> orders{{rank, mine.order}};
  std::set<int> silent;
  auto open = mine.blamed;
  while (!open.empty()) {
    const int suspect = open.back();
    open.pop_back();
    if (orders.contains(suspect) || silent.contains(suspect)) continue;
    const auto theirs = read_failure(store, suspect);
    if (!theirs) {
      silent.insert(suspect);
      continue;
    }
    if (theirs->damage) return {theirs->blamed, true, true};
    orders[suspect] = theirs->order;
    open.insert(open.end(), theirs->blamed.begin(), theirs->blamed.end());
  }
  if (!silent.empty()) return {{silent.begin(), silent.end()}, false};
  const auto last =
      std::max_element(orders.begin(), orders.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return {{last->first}, true};
}

/// The rank that serves the store waits for the records of all ranks that it does not blame,
/// because the store ends with it. If it is to blame itself, the others have decided already.
void wait_for_records(const Store& store, int rank, int size, const Trail& trail) {
  const auto& blamed = trail.ends;
  if (blamed == std::vector<int>{rank}) return;
  const auto deadline = Clock::now() + std::chrono::milliseconds(500);
  for (int other = 0; other < size; ++other) {
    const bool gone = !trail.damage && std::count(blamed.begin(), blamed.end(), other);
    if (other == rank || gone) continue;
    while (!read_failure(store, other) && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

/// True if the store answers within the limit. If `waited`, notes first that this rank has waited
/// for the suspects.
bool answers(const Store& store, int rank, const Waits& waits, const std::vector<int>& suspects,
             bool waited, std::chrono::milliseconds limit) {
  const auto too_late = std::make_shared<std::atomic<bool>>(false);
  const auto answer = call_with_timeout(limit, [=] {
    if (waited) waits.note(suspects, 1);
    try {
      store->check({failure_key(rank)});
    } catch (...) {
      // The store has ended, which is an answer too.
    }
    if (waited && !*too_late) waits.note(suspects, -1);
    return true;
  });
  if (!answer) *too_late = true;
  return answer.has_value();
}

/// Nothing if the store is lost.
std::optional<Trail> resolve_in(const Store& store, int rank, int size, const Waits& waits,
                                const std::vector<int>& suspects, Cause cause,
                                std::chrono::milliseconds grace, bool serves) {
  const bool late = cause == Cause::late || cause == Cause::overdue || cause == Cause::late_here;
  if (is_blamed(store, rank, size)) return Trail{{rank}};
  if ((cause == Cause::gone || cause == Cause::overdue) &&
      has_kept_the_store_from_answering(waits, serves, cause == Cause::overdue))
    return Trail{{rank}};
  FailureRecord mine{next_failure(store), false, suspects, cause == Cause::damage};
  if (mine.order == 0) return std::nullopt;
  if (mine.damage) {
    write_failure(store, rank, mine);
    return Trail{suspects, true, true};
  }
  const auto deadline = Clock::now() + grace;
  if (grace.count() > 0) write_failure(store, rank, mine);
  auto trail = follow(store, rank, mine);
  while (!trail.closed && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    trail = follow(store, rank, mine);
  }
  // If the store did not answer a rank's question, the rank has had time to write its record.
  if (grace.count() > 0 && serves && !trail.closed && waits.on_any()) trail.ends = {rank};
  write_failure(store, rank, {mine.order, late && !trail.damage, trail.ends, trail.damage});
  return trail;
}

}  // namespace

FailureLedger::FailureLedger(const World& world, std::chrono::milliseconds grace)
    : store_(world.store),
      rank_(world.rank),
      size_(world.size),
      waits_(world),
      grace_(grace),
      failures_(world.failures) {
  for (int member = 0; world.start_group.rank_0_serves && member < size_; ++member)
    if (world.world_ranks[member] == 0) server_ = member;
}

std::vector<int> FailureLedger::resolve(const std::vector<int>& suspects, Cause cause) noexcept {
  if (!store_) return suspects;
  try {
    const bool at_once =
        cause == Cause::gone || cause == Cause::late_here || cause == Cause::damage;
    const auto grace = at_once ? std::chrono::milliseconds(0) : grace_;
    const bool serves = rank_ == server_;
    const bool waited = cause == Cause::late || cause == Cause::late_here;
    // If the stopped rank serves the store, the store does not answer. The groups of a process fail
    // one after the other, and only the first waits for it.
    const auto limit = limit_of_answer(failures_.get());
    std::optional<std::optional<Trail>> blamed;
    if (answers(store_, rank_, waits_, suspects, waited, limit)) {
      blamed = call_with_timeout(grace + std::chrono::seconds(1),
                                 [=, store = store_, waits = waits_, rank = rank_, size = size_] {
                                   const auto found = resolve_in(store, rank, size, waits, suspects,
                                                                 cause, grace, serves);
                                   if (found && serves) wait_for_records(store, rank, size, *found);
                                   return found;
                                 });
    }
    if (!blamed && failures_) failures_->store_is_silent = true;
    if (blamed && *blamed) {
      found_damage_ = (**blamed).damage;
      return (**blamed).ends;
    }
    // The store is lost or does not answer: the rank that serves it was killed, or is stopped.
    const bool seen = cause == Cause::late_here;
    return server_ < 0 || serves || seen ? suspects : std::vector<int>{server_};
  } catch (...) {
    return suspects;
  }
}

}  // namespace tessera::comm
