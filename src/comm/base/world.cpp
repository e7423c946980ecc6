#include "comm/base/world.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tessera::comm {

World World::start(int rank, int size, const ProcessGroupOptions& options) {
  World world;
  world.rank = rank;
  world.size = size;
  world.start_group.size = size;
  world.world_ranks.resize(size);
  std::iota(world.world_ranks.begin(), world.world_ranks.end(), 0);
  world.options = options;
  return world;
}

std::vector<int> World::in_world(const std::vector<int>& members) const {
  std::vector<int> result;
  for (const int member : members) result.push_back(world_ranks.at(member));
  return result;
}

const c10::intrusive_ptr<c10d::Store>& store_of_start(const World& world) {
  return world.start_group.store ? world.start_group.store : world.store;
}

bool all_equal(const std::vector<int>& hosts) {
  return std::adjacent_find(hosts.begin(), hosts.end(), std::not_equal_to<>()) == hosts.end();
}

std::string rank_list(const std::vector<int>& ranks) {
  if (ranks.empty()) return "an unknown rank";
  if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
  const std::vector<int> head(ranks.begin(), ranks.end() - 1);
  return fmt::format("ranks {} and {}", fmt::join(head, ", "), ranks.back());
}

}  // namespace tessera::comm
