#include "comm/hosts/host_map.h"

#include <bit>
#include <cstddef>
#include <map>

namespace tessera::comm {

HostMap::HostMap(const std::vector<int>& host_of_rank) {
  std::map<int, int> numbers;
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank) {
    const auto [entry, added] =
        numbers.try_emplace(host_of_rank[rank], static_cast<int>(members_.size()));
    if (added) members_.emplace_back();
    auto& members = members_[entry->second];
    host_of_.push_back(entry->second);
    local_rank_.push_back(static_cast<int>(members.size()));
    members.push_back(static_cast<int>(rank));
  }
}

int HostMap::handler(int host, int owner, int64_t part) const {
  const auto& ranks = members_[host];
  return ranks[(local_rank_[owner] + part) % static_cast<int64_t>(ranks.size())];
}

HostSumTree::HostSumTree(const HostMap& map) : leaves(map.hosts()) {
  std::vector<std::vector<int>> units;
  for (int rank = 0; rank < map.size(); ++rank) units.push_back({rank});
  add(map, units, 0, units.size());
}

HostSumTree HostSumTree::by_host(const HostMap& map) {
  HostSumTree tree;
  tree.leaves.resize(map.hosts());
  std::vector<std::vector<int>> units;
  for (int host = 0; host < map.hosts(); ++host) units.push_back(map.members(host));
  tree.add(map, units, 0, units.size());
  return tree;
}

int HostSumTree::add(const HostMap& map, const std::vector<std::vector<int>>& units, size_t first,
                     size_t count) {
  const int host = map.host_of(units[first][0]);
  bool together = true;
  Node node;
  for (size_t unit = first; unit < first + count; ++unit) {
    together = together && map.host_of(units[unit][0]) == host;
    node.ranks.insert(node.ranks.end(), units[unit].begin(), units[unit].end());
  }
  if (together) {
    leaves[host].push_back(static_cast<int>(nodes.size()));
  } else {
    const size_t left = std::bit_floor(count - 1);
    node.ranks.clear();
    node.left = add(map, units, first, left);
    node.right = add(map, units, first + left, count - left);
  }
  nodes.push_back(std::move(node));
  return static_cast<int>(nodes.size()) - 1;
}

}  // namespace tessera::comm
