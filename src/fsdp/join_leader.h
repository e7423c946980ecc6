#pragma once

#include <cstdint>
#include <vector>

#include "tessera/join.h"
#include "tessera/process_group.h"

namespace tessera::fsdp {

/// [Note: ranks without data] In a join, while some rank is out of data, the first rank that has
/// some tells what it is about to do that others must be in, and ranks without data do the same,
/// with gradients of zero. They so take whatever way the model takes, also one that they have never
/// seen, and come out with the same forecast and the same units as all. Told are decisions' causes,
/// not their results: every rank decides alike what to release and prefetch.
struct Event {
  enum class Kind : int64_t {
    forward,  ///< Begins: whether in full precision.
    forward_over,
    use,       ///< Of units: phase, units.
    gradient,  ///< The first of a flat: sync, flat.
    reduce,    ///< Of a flat: flat, and of each member whether it has a gradient.
    over,      ///< Backward is: sync.
  };
  Kind kind;
  std::vector<int64_t> values;
};

class JoinLeader {
 public:
  explicit JoinLeader(ProcessGroup world)
      : world_(std::move(world)),
        world_size_(world_.size()),
        iteration_{world_size_, 0, world_size_} {}

  void begin_iteration(const JoinIteration& iteration) { iteration_ = iteration; }
  /// Of the mean of gradients.
  int divisor() const { return iteration_.divisor; }

  /// Whether some rank has no data and hears what this one tells.
  bool is_leader() const { return !follows_ && iteration_.active_ranks < world_size_; }
  /// To ranks without data, if there are any: on all others. Collective then.
  void broadcast_event(Event::Kind kind, c10::ArrayRef<int64_t> values);
  /// On ranks without data. Collective.
  Event receive_event();

  /// While alive, this rank hears and does not tell.
  class Follow {
   public:
    explicit Follow(JoinLeader& join_leader) : join_leader_(join_leader) { join_leader_.follows_ = true; }
    ~Follow() { join_leader_.follows_ = false; }
    Follow(const Follow&) = delete;

   private:
    JoinLeader& join_leader_;
  };

 private:
  ProcessGroup world_;
  int world_size_;
  JoinIteration iteration_;
  bool follows_ = false;
};

}  // namespace tessera::fsdp
