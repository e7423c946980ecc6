#include "comm/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <set>

namespace tessera::comm {
namespace {

std::string key_of(int rank) { return "failed/" + std::to_string(rank); }

std::string text_of(const std::vector<int>& ranks) { return fmt::format("{}", fmt::join(ranks, " ")); }

std::vector<int> ranks_of(const std::vector<uint8_t>& bytes) {
  std::vector<int> ranks;
  int value = -1;
  for (auto c : bytes) {
    if (c >= '0' && c <= '9') value = (value < 0 ? 0 : value * 10) + (c - '0');
    else if (value >= 0) { ranks.push_back(value); value = -1; }
  }
  if (value >= 0) ranks.push_back(value);
  return ranks;
}

}  // namespace

World World::start(int rank, int size, const ProcessGroupOptions& options) {
  World world;
  world.rank = rank;
  world.size = size;
  world.world_ranks.resize(size);
  std::iota(world.world_ranks.begin(), world.world_ranks.end(), 0);
  world.options = options;
  return world;
}

bool all_equal(const std::vector<int>& hosts) { return std::adjacent_find(hosts.begin(), hosts.end(), std::not_equal_to<>()) == hosts.end(); }

FailureLedger::FailureLedger(const World& world) : store_(world.store), rank_(world.rank) {}

std::vector<int> FailureLedger::resolve(const std::vector<int>& suspects) noexcept {
  std::set<int> seen, blamed;
  std::vector<int> open = suspects;
  try {
    while (!open.empty()) {
      const int suspect = open.back();
      open.pop_back();
      if (suspect == rank_ || !seen.insert(suspect).second) continue;
      std::vector<int> theirs;
      if (store_ && store_->check({key_of(suspect)})) theirs = ranks_of(store_->get(key_of(suspect)));
      std::erase(theirs, rank_);
      if (theirs.empty()) blamed.insert(suspect);
      else open.insert(open.end(), theirs.begin(), theirs.end());
    }
  } catch (...) {
    // The store went with its owner; what is known so far stands.
  }
  if (blamed.empty()) blamed.insert(suspects.begin(), suspects.end());
  std::vector<int> result(blamed.begin(), blamed.end());
  try {
    if (store_) {
      const auto text = text_of(result);
      store_->set(key_of(rank_), std::vector<uint8_t>(text.begin(), text.end()));
    }
  } catch (...) {
  }
  return result;
}

std::string rank_list(const std::vector<int>& ranks) {
  if (ranks.empty()) return "an unknown rank";
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  const std::vector<int> head(ranks.begin(), ranks.end() - 1);
  return fmt::format("ranks {} and {}", fmt::join(head, ", "), ranks.back());
}

}  // namespace tessera::comm
