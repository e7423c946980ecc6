#pragma once

#include <cstddef>
#include <vector>

#include "tessera/process_group.h"

namespace tessera::sharding {

/// [Note: lanes] A collective between hosts begins and ends without data on the wire: the ranks
/// agree on it, add up within their host, and copy the result there. With a second group of the
/// same ranks, a lane, the wire carries another collective meanwhile. The number of lanes for
/// collectives of `group`: 1 on one host and for tensors of a device. The same on all ranks.
///
/// Where there are several lanes, or values travel encoded, the wrapper's own group compares the
/// collectives of all lanes, in the order in which they are called, and moves none of their data.
/// So ranks that call different collectives never wait for each other in different lanes.
size_t lanes_between_hosts(const ProcessGroup& group);

/// Groups of the same ranks, whose collectives run beside each other.
class Lanes {
 public:
  /// One lane, of this rank alone.
  Lanes() : groups_(1) {}
  /// A single lane is `group` itself if values travel exactly, unless `apart`: then the other
  /// collectives of `group` do not wait behind the data of the lane. Collective: see
  /// ProcessGroup::with_wire() and duplicate().
  Lanes(ProcessGroup group, WireFormat format, size_t count, bool apart = false);

  const std::vector<ProcessGroup>& groups() const { return groups_; }
  /// The group of collective number `turn`: the lanes take turns.
  const ProcessGroup& group(size_t turn) const { return groups_[turn % groups_.size()]; }

 private:
  std::vector<ProcessGroup> groups_;
};

}  // namespace tessera::sharding
