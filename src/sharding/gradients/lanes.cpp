#include "sharding/gradients/lanes.h"

#include <utility>

namespace tessera::sharding {

size_t lanes_between_hosts(const ProcessGroup& group) {
  return group.messages_between_hosts() ? 2 : 1;
}

Lanes::Lanes(ProcessGroup group, WireFormat format, size_t count) {
  groups_.push_back(group.with_wire(format));
  while (groups_.size() < count) groups_.push_back(groups_[0].duplicate());
}

Lanes Lanes::with_first_apart(ProcessGroup group, WireFormat format, size_t count) {
  Lanes lanes(std::move(group), format, count);
  lanes.first_apart_ = true;
  return lanes;
}

}  // namespace tessera::sharding
