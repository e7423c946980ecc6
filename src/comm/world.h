#pragma once

#include "tessera/process_group.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>
#include <vector>

namespace tessera::comm {

/// Where one rank stands and how it meets the others: everything a transport needs to be built.
struct World {
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;          ///< Of the members, in the start-up group.
  bool same_host = true;                 ///< All members on this host: loopback only.
  std::vector<int> hosts;                ///< Of the members: equal numbers share a host. Empty: not known, or all on one.
  std::string address;                   ///< This host's, as the others reach it; empty: not known.
  c10::intrusive_ptr<c10d::Store> store; ///< Shared by the members; keys already prefixed for this group.
  ProcessGroupOptions options;

  /// Rank `rank` of a start-up group: the members are 0 … size-1. Where they are and how they meet is the caller's to set.
  static World start(int rank, int size, const ProcessGroupOptions& options);
};

/// Whether members with these host numbers are all on one.
bool all_equal(const std::vector<int>& hosts);

/// Who gave up, and whom they blamed, kept in the store so that a survivor that sees another survivor leave can name
/// the rank where it began.
class FailureLedger {
 public:
  explicit FailureLedger(const World& world);

  /// The ranks to blame for `suspects` being gone, after following what they recorded before leaving; and records that as
  /// this rank's own reason. Never throws.
  std::vector<int> resolve(const std::vector<int>& suspects) noexcept;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
};

/// "rank 2" / "ranks 1 and 3".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace tessera::comm
