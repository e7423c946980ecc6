#pragma once

#include <cstdint>
#include <vector>

namespace tessera::comm {

/// The host of each rank of a group.
class HostMap {
 public:
  /// `host_of_rank`: one number for each rank; equal for ranks of one host.
  explicit HostMap(const std::vector<int>& host_of_rank);

  int hosts() const { return static_cast<int>(members_.size()); }
  int size() const { return static_cast<int>(host_of_.size()); }
  int host_of(int rank) const { return host_of_[rank]; }  ///< Hosts are numbered from 0.
  int local_rank(int rank) const { return local_rank_[rank]; }
  /// Ranks of a host, ascending.
  const std::vector<int>& members(int host) const { return members_[host]; }
  /// The rank of `host` that exchanges the messages about part `part` of the data of `owner`, a
  /// rank of another host.
  int handler(int host, int owner, int64_t part) const;

 private:
  std::vector<int> host_of_, local_rank_;
  std::vector<std::vector<int>> members_;
};

/// The sum over all ranks as a binary tree (base/tree_sum.h), cut so that each leaf is a block of
/// ranks of one host.
struct HostSumTree {
  struct Node {
    std::vector<int> ranks;     ///< A leaf's ranks, ascending; empty: a sum of two nodes.
    int left = -1, right = -1;  ///< Indices of the two nodes.
  };

  explicit HostSumTree(const HostMap& map);
  /// The tree with one leaf for each host: the sum of all its ranks, whatever their numbers.
  static HostSumTree by_host(const HostMap& map);

  std::vector<Node> nodes;               ///< The last one is the sum over all ranks.
  std::vector<std::vector<int>> leaves;  ///< The indices of each host's leaves, ascending.

 private:
  HostSumTree() = default;
  /// Adds the sum over some units, which are ranks that are not divided.
  int add(const HostMap& map, const std::vector<std::vector<int>>& units, size_t first,
          size_t count);
};

}  // namespace tessera::comm
