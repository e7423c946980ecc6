#pragma once

#include "tessera/process_group.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
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

/// Who gave up, and whom they blamed, kept in the store so that a survivor that sees another survivor leave, or misses it, can
/// name the rank where it began.
class FailureLedger {
 public:
  /// `patience`: how long a rank whose time is almost up waits for the reasons of those it misses. Their times are up within
  /// moments of each other, and they may yet write.
  explicit FailureLedger(const World& world, std::chrono::milliseconds patience = std::chrono::milliseconds(300));

  /// A peer that goes when the time is almost up may have given up itself: Gloo closes its connections before it can say why.
  enum class Cause { gone, gone_near_the_time_out, late };

  /// The ranks to blame for `suspects` being gone or late, after following what they recorded; and records that as this
  /// rank's own reason. It is this rank itself where the others gave up on it first. Never throws, and takes no longer than
  /// a second more than the patience, whatever has become of the store.
  std::vector<int> resolve(const std::vector<int>& suspects, Cause cause) noexcept;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::chrono::milliseconds patience_;
};

/// "rank 2" / "ranks 1 and 3".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace tessera::comm
