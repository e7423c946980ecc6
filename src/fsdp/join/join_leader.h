#pragma once

#include <utility>

#include "fsdp/join/join_event.h"
#include "tessera/join.h"
#include "tessera/process_group.h"

namespace tessera::fsdp {

/// Sends and receives the events of a join. See [Note: ranks without data].
class JoinLeader {
 public:
  explicit JoinLeader(ProcessGroup world)
      : world_(std::move(world)),
        world_size_(world_.size()),
        iteration_{world_size_, 0, world_size_} {}

  void begin_iteration(const JoinIteration& iteration) { iteration_ = iteration; }
  /// The number by which the sum of gradients is divided.
  int divisor() const { return iteration_.divisor; }

  /// True if some rank has no data.
  bool some_rank_has_no_data() const { return iteration_.active_ranks < world_size_; }
  /// True if this rank has data while some other rank has none, so that broadcast_event() sends.
  bool must_broadcast() const { return !follows_ && some_rank_has_no_data(); }
  /// On ranks with data: if some rank has no data, the first rank with data sends `event` to all,
  /// and the call is collective. Otherwise it does nothing.
  void broadcast_event(const JoinEvent& event) {
    if (!must_broadcast()) return;
    const bool sends = world_.rank() == iteration_.first_active;
    world_.broadcast_bytes(sends ? to_bytes(event) : "", iteration_.first_active);
  }
  /// On ranks without data. Collective.
  JoinEvent receive_event() {
    return event_from_bytes(world_.broadcast_bytes("", iteration_.first_active));
  }

  /// Sets whether this rank receives events and does not send them.
  void follow(bool follows) { follows_ = follows; }

 private:
  ProcessGroup world_;
  int world_size_;
  JoinIteration iteration_;
  bool follows_ = false;
};

}  // namespace tessera::fsdp
