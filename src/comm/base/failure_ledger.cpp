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

std::string key_of(int rank) { return "failed/" + std::to_string(rank); }

/// Whom a rank blames.
struct Reason {
  int64_t order = 0;     ///< Of the ranks that gave up, from 1.
  bool verdict = false;  ///< It missed somebody until the time-out, has followed the others'
                         ///< reasons, and is about to leave.
  std::vector<int> ranks;
};

std::optional<Reason> read(const Store& store, int rank) {
  try {
    if (!store->check({key_of(rank)})) return std::nullopt;
    const auto bytes = store->get(key_of(rank));
    std::istringstream text(std::string(bytes.begin(), bytes.end()));
    Reason reason;
    text >> reason.order >> reason.verdict;
    for (int blamed; text >> blamed;) reason.ranks.push_back(blamed);
    return reason;
  } catch (...) {
    return std::nullopt;  // The store went with its owner; what is known so far stands.
  }
}

void write(const Store& store, int rank, const Reason& reason) {
  try {
    const auto text =
        fmt::format("{} {:d} {}", reason.order, reason.verdict, fmt::join(reason.ranks, " "));
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

/// Who has given up for good on this rank: it was stopped, say, and its own view comes too late to
/// count.
bool is_given_up(const Store& store, int rank, int size) {
  for (int other = 0; other < size; ++other) {
    const auto theirs = other == rank ? std::nullopt : read(store, other);
    if (theirs && theirs->verdict && std::count(theirs->ranks.begin(), theirs->ranks.end(), rank))
      return true;
  }
  return false;
}

struct Trail {
  std::vector<int> ends;  ///< Ascending.
  bool closed = false;    ///< All along it gave a reason, so it ends nowhere.
};

/// From `mine` along the reasons of those it names to the ranks that gave none. In a circle the
/// rank that gave up last is to blame: the others missed it before it missed anybody.
Trail follow(const Store& store, int rank, const Reason& mine) {
  std::map<int, int64_t> orders{{rank, mine.order}};
  std::set<int> silent;
  auto open = mine.ranks;
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
    open.insert(open.end(), theirs->ranks.begin(), theirs->ranks.end());
  }
  if (!silent.empty()) return {{silent.begin(), silent.end()}, false};
  const auto last =
      std::max_element(orders.begin(), orders.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  return {{last->first}, true};
}

std::vector<int> resolve_in(const Store& store, int rank, int size,
                            const std::vector<int>& suspects, bool late,
                            std::chrono::milliseconds grace) {
  if (is_given_up(store, rank, size)) return {rank};
  Reason mine{next_order(store), false, suspects};
  const auto deadline = Clock::now() + grace;
  if (grace.count() > 0) write(store, rank, mine);
  auto trail = follow(store, rank, mine);
  while (!trail.closed && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    trail = follow(store, rank, mine);
  }
  write(store, rank, {mine.order, late, trail.ends});
  return trail.ends;
}

}  // namespace

FailureLedger::FailureLedger(const World& world, std::chrono::milliseconds grace)
    : store_(world.store), rank_(world.rank), size_(world.size), grace_(grace) {}

std::vector<int> FailureLedger::resolve(const std::vector<int>& suspects, Cause cause) noexcept {
  if (!store_) return suspects;
  try {
    const bool late = cause == Cause::late;
    const auto grace = cause == Cause::gone ? std::chrono::milliseconds(0) : grace_;
    // A store whose server is the stopped rank does not answer.
    const auto blamed = call_with_timeout(
        grace + std::chrono::seconds(1), [=, store = store_, rank = rank_, size = size_] {
          return resolve_in(store, rank, size, suspects, late, grace);
        });
    return blamed.value_or(suspects);
  } catch (...) {
    return suspects;
  }
}

}  // namespace tessera::comm
