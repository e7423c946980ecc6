#include "fsdp/join/join_leader.h"

namespace tessera::fsdp {

void JoinLeader::broadcast_event(const JoinEvent& event) {
  if (!must_broadcast()) return;
  const bool sends = world_.rank() == iteration_.first_active;
  world_.broadcast_bytes(sends ? to_bytes(event) : "", iteration_.first_active);
}

JoinEvent JoinLeader::receive_event() {
  return event_from_bytes(world_.broadcast_bytes("", iteration_.first_active));
}

}  // namespace tessera::fsdp
