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

HostSumTree::HostSumTree(const HostMap& map) : leaves(map.hosts()) { add(map, 0, map.size()); }

int HostSumTree::add(const HostMap& map, int first, int count) {
  const int host = map.host_of(first);
  bool together = true;
  for (int rank = first; rank < first + count; ++rank)
    together = together && map.host_of(rank) == host;
  Node node;
  if (together) {
    for (int rank = first; rank < first + count; ++rank) node.ranks.push_back(rank);
    leaves[host].push_back(static_cast<int>(nodes.size()));
  } else {
    const int left = static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1)));
    node.left = add(map, first, left);
    node.right = add(map, first + left, count - left);
  }
  nodes.push_back(std::move(node));
  return static_cast<int>(nodes.size()) - 1;
}

HostSumTree HostSumTree::by_host(const HostMap& map) {
  HostSumTree tree;
  tree.leaves.resize(map.hosts());
  tree.add_hosts(map, 0, map.hosts());
  return tree;
}

int HostSumTree::add_hosts(const HostMap& map, int first, int count) {
  Node node;
  if (count == 1) {
    node.ranks = map.members(first);
    leaves[first].push_back(static_cast<int>(nodes.size()));
  } else {
    const int left = static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1)));
    node.left = add_hosts(map, first, left);
    node.right = add_hosts(map, first + left, count - left);
  }
  nodes.push_back(std::move(node));
  return static_cast<int>(nodes.size()) - 1;
}

}  // namespace tessera::comm
