#include "sharding/gradients/lanes.h"

#include <utility>

namespace tessera::sharding {

size_t lanes_between_hosts(const ProcessGroup& group) {
  return group.messages_between_hosts() ? 2 : 1;
}

Lanes::Lanes(ProcessGroup group, WireFormat format, size_t count) {
  groups_.push_back(group.with_wire(format));
  const bool exact = groups_[0].impl() == group.impl();
  while (groups_.size() < count)
    groups_.push_back(exact ? group.duplicate() : group.with_wire(format));
}

Lanes Lanes::with_first_apart(ProcessGroup group, WireFormat format, size_t count) {
  Lanes lanes(std::move(group), format, count);
  lanes.first_apart_ = true;
  return lanes;
}

Lanes Lanes::encoded(WireFormat format) const {
  Lanes lanes = *this;
  for (auto& group : lanes.groups_) group = group.with_wire(format);
  return lanes;
}

}  // namespace tessera::sharding
