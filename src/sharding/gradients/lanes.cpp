#include "sharding/gradients/lanes.h"

#include "comm/group/process_group_impl.h"

namespace tessera::sharding {

size_t lanes_between_hosts(const ProcessGroup& group) {
  const bool on_host = group.impl()->world.options.staged_device == at::kCPU;
  return on_host && group.messages_between_hosts() ? 2 : 1;
}

Lanes::Lanes(ProcessGroup group, WireFormat format, size_t count, bool apart) {
  auto& impl = *group.impl();
  groups_.push_back(group.with_wire(format));
  const bool exact = groups_[0].impl() == group.impl();
  if (exact && (count > 1 || apart)) {
    group.check_contract("a lane", {});
    groups_.clear();
  }
  while (groups_.size() < count)
    groups_.push_back(exact ? ProcessGroup(impl.duplicate(impl.world, "lane", group.impl()))
                            : group.with_wire(format));
}

}  // namespace tessera::sharding
