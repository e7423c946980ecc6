#pragma once

#include <cstddef>
#include <vector>

#include "tessera/process_group.h"

namespace tessera::sharding {

/// [Note: lanes] A collective between hosts begins and ends without data on the wire: the ranks
/// agree on it, add up within their host, and copy the result there. With a second group of the
/// same ranks, a lane, the wire carries another collective meanwhile. The number of lanes for
/// collectives of `group`: 1 on one host and for a device's backend. The same on all ranks.
///
/// A rank that skips its backward must not make the others wait in a lane that it does not use. So
/// the first collective of a forward or backward uses the first lane, which is the wrapper's own
/// group, or a group of with_wire() whose collectives are compared in it. ZeroRedundancyOptimizer's
/// lanes belong to a duplicate group: its backward does not wait for collectives in them.
size_t lanes_between_hosts(const ProcessGroup& group);

/// Groups of the same ranks, whose collectives run beside each other.
class Lanes {
 public:
  /// One lane, of this rank alone.
  Lanes() : groups_(1) {}
  /// The first of `count` lanes is `group` itself if values travel exactly, and the others are
  /// duplicates. Otherwise all are of with_wire(), and their collectives are compared in `group`,
  /// in the order in which they are called. Collective.
  Lanes(ProcessGroup group, WireFormat format, size_t count);
  /// As the constructor, where only collective number 0 uses the first lane: the other collectives
  /// of the wrapper's own group then do not wait behind the rest. count > 1.
  static Lanes with_first_apart(ProcessGroup group, WireFormat format, size_t count);
  /// A lane of with_wire() for each of these lanes. Collective.
  Lanes encoded(WireFormat format) const;

  const std::vector<ProcessGroup>& groups() const { return groups_; }
  /// The group of collective number `turn`: the lanes take turns.
  const ProcessGroup& group(size_t turn) const {
    if (turn == 0 || !first_apart_) return groups_[turn % groups_.size()];
    return groups_[1 + (turn - 1) % (groups_.size() - 1)];
  }

 private:
  std::vector<ProcessGroup> groups_;
  bool first_apart_ = false;
};

}  // namespace tessera::sharding
