#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/process_group.h"

namespace tessera::comm {

/// Where one rank stands and how it meets the others: everything a transport needs to be built.
struct World {
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;  ///< Of the members, in the start-up group.
  bool same_host = true;         ///< All members on this host: loopback only.
  std::vector<int>
      hosts;  ///< Of the members: equal numbers share a host. Empty: not known, or all on one.
  std::string address;  ///< This host's, as the others reach it; empty: not known.
  c10::intrusive_ptr<c10d::Store>
      store;  ///< Shared by the members; keys already prefixed for this group.
  ProcessGroupOptions options;

  /// Rank `rank` of a start-up group: the members are 0 … size-1. Where they are and how they meet
  /// is the caller's to set.
  static World start(int rank, int size, const ProcessGroupOptions& options);
};

/// Whether members with these host numbers are all on one.
bool all_equal(const std::vector<int>& hosts);

/// "rank 2" / "ranks 1 and 3".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace tessera::comm
