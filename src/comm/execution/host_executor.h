#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/world.h"
#include "comm/execution/executor.h"
#include "comm/execution/group_failure.h"
#include "comm/execution/queue.h"

namespace tessera::comm {

/// Runs collectives on CPU tensors, one at a time in the order of issue(): on the calling thread if
/// no other one runs, else on the queue's. Each one begins with a comparison of the ranks' headers.
class HostExecutor : public Executor {
 public:
  /// `world` and `transport` (null in a group of one rank) must live longer. `clock`: see Queue.
  /// `compares`: false if another group compares the headers.
  HostExecutor(const World& world, Transport* transport, std::shared_ptr<WaitClock> clock,
               bool compares);

  Work issue(Call call, Mode mode) override;
  /// Runs a call, while the caller has the queue's turn.
  void execute(Call call);
  /// Throws if the group has ended, or if a queued operation has failed and nobody has seen it.
  void check_open();
  /// Calls of a DivergenceScope are compared again.
  void rejoin() { diverged_ = false; }
  /// Ends the group with this rank's failure, and starts informing the other ranks.
  Work announce(const std::string& message);
  /// Ends the group when this rank has done its part of the collectives that all have begun.
  Work end_behind(const std::string& message);

  bool compares() const { return compares_; }
  Queue& queue() { return queue_; }
  GroupFailure& failure() { return failure_; }
  const GroupFailure& failure() const { return failure_; }
  Transport& transport() const { return *transport_; }
  const World& world() const { return world_; }

 private:
  Headers compare(const Call& call);
  std::string disagreement(const Headers& headers, int other, const std::string& tag) const;

  const World& world_;
  Transport* const transport_;
  const bool compares_;
  uint64_t sequence_ = 0;
  std::atomic<bool> diverged_ = false;
  GroupFailure failure_;
  Queue queue_;
};

/// Ends a group and its sub-groups `below` because of this rank's mistake: see
/// ProcessGroup::fail().
[[noreturn]] void fail(HostExecutor& group, const std::vector<HostExecutor*>& below,
                       const std::string& message);

}  // namespace tessera::comm
