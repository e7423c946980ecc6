#include "comm/base/failure_ledger.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "comm/base/call_with_timeout.h"

namespace tessera::comm {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using Clock = std::chrono::steady_clock;
using Cause = FailureLedger::Cause;

std::string key_of(int rank) { return "failed/" + std::to_string(rank); }

/// What a rank that gives up writes to the store.
struct Record {
  int64_t order = 0;     ///< Position among the ranks that gave up, from 1.
  bool verdict = false;  ///< Final, and written after a time-out.
  std::vector<int> blamed;
};

std::optional<Record> read(const Store& store, int rank) {
  try {
    if (!store->check({key_of(rank)})) return std::nullopt;
    const auto bytes = store->get(key_of(rank));
    std::istringstream text(std::string(bytes.begin(), bytes.end()));
    Record record;
    text >> record.order >> record.verdict;
    for (int rank_blamed; text >> rank_blamed;) record.blamed.push_back(rank_blamed);
    return record;
  } catch (...) {
    return std::nullopt;  // the rank that serves the store has ended
  }
}

void write(const Store& store, int rank, const Record& record) {
  try {
    const auto text =
        fmt::format("{} {:d} {}", record.order, record.verdict, fmt::join(record.blamed, " "));
    store->set(key_of(rank), std::vector<uint8_t>(text.begin(), text.end()));
  } catch (...) {
  }
}

int64_t next_order(const Store& store) {
  try {
    return store->add("failures", 1);
  } catch (...) {
    return 0;
  }
}

std::string waited_key(int missing) { return "waited/" + std::to_string(missing); }

/// Says that `rank` has waited for `missing` until the time-out. Needs no answer from the store: if
/// the missing rank serves the store and is stopped, it finds this when it continues.
void note_wait(const Store& store, int rank, int missing) {
  try {
    const auto text = std::to_string(rank);
    store->set(waited_key(missing), std::vector<uint8_t>(text.begin(), text.end()));
  } catch (...) {
  }
}

/// True if another rank has waited for `missing` until the time-out, and the store did not answer
/// it afterwards.
bool was_not_answered(const Store& store, int rank, int missing) {
  try {
    if (!store->check({waited_key(missing)})) return false;
    const auto bytes = store->get(waited_key(missing));
    const int waiter = std::stoi(std::string(bytes.begin(), bytes.end()));
    return waiter != rank && !read(store, waiter);
  } catch (...) {
    return false;
  }
}

bool is_any_unanswered(const Store& store, int rank, int size) {
  for (int missing = 0; missing < size; ++missing) {
    if (was_not_answered(store, rank, missing)) return true;
  }
  return false;
}

/// True if another rank has waited for this one until the time-out, and the store did not answer it
/// afterwards. `serves`: this rank serves the store, and the notes of the ranks that waited may be
/// still to be read. `overdue`: it did not run for a while, and may be missed through other ranks.
bool has_kept_the_store_from_answering(const Store& store, int rank, int size, bool serves,
                                       bool overdue) {
  if (!serves) return was_not_answered(store, rank, rank);
  // A rank that was stopped between two collectives is not overdue. The store reads what has
  // arrived within milliseconds.
  const auto deadline = Clock::now() + std::chrono::milliseconds(overdue ? 1000 : 100);
  do {
    if (overdue ? is_any_unanswered(store, rank, size) : was_not_answered(store, rank, rank))
      return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  } while (Clock::now() < deadline);
  return false;
}

/// True if another rank has waited for this one until the time-out and then blamed it. This rank
/// was stopped, for example, and its own record would come too late.
bool is_blamed(const Store& store, int rank, int size) {
  for (int other = 0; other < size; ++other) {
    const auto theirs = other == rank ? std::nullopt : read(store, other);
    if (theirs && theirs->verdict && std::count(theirs->blamed.begin(), theirs->blamed.end(), rank))
      return true;
  }
  return false;
}

struct Trail {
  std::vector<int> ends;  ///< The ranks to blame, ascending.
  bool closed = false;    ///< All ranks along it have records, so it is a circle.
};

/// Follows the records from `mine` to the ranks that have none. In a circle, the rank that gave up
/// last is to blame: the others missed it before it missed any rank.
Trail follow(const Store& store, int rank, const Record& mine) {
  std::map<int, int64_t> orders{{rank, mine.order}};
  std::set<int> silent;
  auto open = mine.blamed;
  while (!open.empty()) {
    const int suspect = open.back();
    open.pop_back();
    if (orders.contains(suspect) || silent.contains(suspect)) continue;
    const auto theirs = read(store, suspect);
    if (!theirs) {
      silent.insert(suspect);
      continue;
    }
    orders[suspect] = theirs->order;
    open.insert(open.end(), theirs->blamed.begin(), theirs->blamed.end());
  }
  if (!silent.empty()) return {{silent.begin(), silent.end()}, false};
  const auto last =
      std::max_element(orders.begin(), orders.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return {{last->first}, true};
}

/// The rank that serves the store waits until all others but those it blames have written their
/// records: the store ends with it.
void wait_for_records(const Store& store, int rank, int size, const std::vector<int>& blamed) {
  const auto deadline = Clock::now() + std::chrono::milliseconds(500);
  for (int other = 0; other < size; ++other) {
    if (other == rank || std::count(blamed.begin(), blamed.end(), other)) continue;
    while (!read(store, other) && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

/// Whether the store answers within the limit. If `waited`, notes first that this rank has waited
/// for the suspects.
bool answers(const Store& store, int rank, const std::vector<int>& suspects, bool waited,
             std::chrono::milliseconds limit) {
  const auto answer = call_with_timeout(limit, [=] {
    for (size_t i = 0; waited && i < suspects.size(); ++i) note_wait(store, rank, suspects[i]);
    try {
      store->check({key_of(rank)});
    } catch (...) {
      // It has ended, which is an answer too.
    }
    return true;
  });
  return answer.has_value();
}

/// Nothing if the store is lost.
std::optional<std::vector<int>> resolve_in(const Store& store, int rank, int size,
                                           const std::vector<int>& suspects, Cause cause,
                                           std::chrono::milliseconds grace, bool serves) {
  const bool late = cause == Cause::late || cause == Cause::overdue || cause == Cause::late_here;
  if (is_blamed(store, rank, size)) return {{rank}};
  if ((cause == Cause::gone || cause == Cause::overdue) &&
      has_kept_the_store_from_answering(store, rank, size, serves, cause == Cause::overdue))
    return {{rank}};
  Record mine{next_order(store), false, suspects};
  if (mine.order == 0) return std::nullopt;
  const auto deadline = Clock::now() + grace;
  if (grace.count() > 0) write(store, rank, mine);
  auto trail = follow(store, rank, mine);
  while (!trail.closed && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    trail = follow(store, rank, mine);
  }
  // A rank whose question the store did not answer has had the time to write its record since.
  if (late && serves && !trail.closed && is_any_unanswered(store, rank, size)) trail.ends = {rank};
  write(store, rank, {mine.order, late, trail.ends});
  return trail.ends;
}

}  // namespace

FailureLedger::FailureLedger(const World& world, std::chrono::milliseconds grace)
    : store_(world.store),
      rank_(world.rank),
      size_(world.size),
      grace_(grace),
      store_is_silent_(world.store_is_silent) {
  for (int member = 0; world.rank_0_serves_store && member < size_; ++member) {
    if (world.world_ranks[member] == 0) server_ = member;
  }
}

std::vector<int> FailureLedger::resolve(const std::vector<int>& suspects, Cause cause) noexcept {
  if (!store_) return suspects;
  try {
    const bool at_once = cause == Cause::gone || cause == Cause::late_here;
    const auto grace = at_once ? std::chrono::milliseconds(0) : grace_;
    const bool serves = rank_ == server_;
    const bool waited = cause == Cause::late || cause == Cause::late_here;
    // If the stopped rank serves the store, the store does not answer. The groups of a process fail
    // one after the other, and only the first waits for it.
    const auto limit = std::chrono::milliseconds(*store_is_silent_ ? 100 : 1000);
    std::optional<std::optional<std::vector<int>>> blamed;
    if (answers(store_, rank_, suspects, waited, limit)) {
      blamed = call_with_timeout(
          grace + std::chrono::seconds(1), [=, store = store_, rank = rank_, size = size_] {
            const auto found = resolve_in(store, rank, size, suspects, cause, grace, serves);
            if (found && serves) wait_for_records(store, rank, size, *found);
            return found;
          });
    }
    if (!blamed) *store_is_silent_ = true;
    if (blamed && *blamed) return **blamed;
    // The store is lost or does not answer: the rank that serves it was killed, or is stopped.
    const bool seen = cause == Cause::late_here;
    return server_ < 0 || serves || seen ? suspects : std::vector<int>{server_};
  } catch (...) {
    return suspects;
  }
}

}  // namespace tessera::comm
