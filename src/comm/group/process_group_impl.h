#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/execution/host_executor.h"
#include "comm/group/traffic.h"
#include "tessera/detail/own_process.h"

namespace tessera {

/// The state that the copies of one ProcessGroup share.
class ProcessGroup::Impl {
 public:
  Impl();  // a group of one rank
  /// `traffic`: the counters of the group with which this one shares them; null: its own.
  /// `control`: the group that compares this one's collectives; null: this one.
  Impl(comm::World world, std::unique_ptr<comm::Transport> transport,
       std::shared_ptr<comm::Traffic> traffic = nullptr, std::shared_ptr<Impl> control = nullptr);
  ~Impl();

  /// As std::make_shared. A forked child does not destroy the group: it has none of its threads,
  /// and the other ranks belong to the parent.
  template <class... Arguments>
  static std::shared_ptr<Impl> make(Arguments&&... arguments) {
    return {new Impl(std::forward<Arguments>(arguments)...), [](Impl* impl) {
              if (impl->process_.is_this()) delete impl;
            }};
  }

  /// Runs one collective; in a group of one rank it does nothing. The tags of the thread's TagScope
  /// come before the call's.
  Work issue(comm::Call call, comm::Mode mode = comm::Mode::wait);
  /// Ends the effect of a divergence on this rank: see DivergenceScope. No call may be running.
  void rejoin();
  /// See ProcessGroup::fail(). Informs the ranks of this group and of its sub-groups, because each
  /// may wait in any of them.
  [[noreturn]] void fail(const std::string& message);
  bool ended() const { return host_.failure().ended(); }
  void add_child(const std::shared_ptr<Impl>& child);
  /// The sub-groups, their sub-groups, and so on, if they are alive.
  std::vector<std::shared_ptr<Impl>> descendants();
  /// Another group of the same ranks with this one's counters, for `method`. `control`: this group,
  /// if it compares the other one's collectives, on CPU tensors, in the order of their calls.
  std::shared_ptr<Impl> duplicate(comm::World world, const char* method,
                                  std::shared_ptr<Impl> control = nullptr);

  bool alone() const { return world.size == 1; }
  comm::Traffic& traffic() { return *traffic_; }
  void count(CollectiveStats CommStats::*kind, uint64_t sent, uint64_t received) {
    traffic_->count(kind, sent, received);
  }

  comm::World world;
  std::unique_ptr<comm::Transport> transport;  // null in a group of one rank
  uint64_t splits = 0;

 private:
  /// Throws UsageError in a forked child: it would take the parent's part in a collective.
  void check_process() const;
  comm::Executor& executor();

  detail::OwnProcess process_;
  std::shared_ptr<Impl> control_;
  std::mutex children_mutex_;
  std::vector<std::weak_ptr<Impl>> children_;
  std::shared_ptr<comm::Traffic> traffic_;
  comm::HostExecutor host_;
  std::unique_ptr<comm::Executor> executor_;  // over `host_`; null: `host_` runs the collectives
};

}  // namespace tessera
