#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/base/world.h"

namespace tessera::comm {

/// The failures of one process, which its groups share. While one group fails, other ranks may wait
/// for this rank in another group, where they only see that it leaves. This class writes the
/// failure to those groups' records too. From any thread.
class ProcessFailures {
 public:
  ProcessFailures() = default;
  /// The store ends with the rank that serves it. If groups were told of a failure, that rank waits
  /// up to half a second until the other ranks have written their records too.
  ~ProcessFailures();
  ProcessFailures(const ProcessFailures&) = delete;
  ProcessFailures& operator=(const ProcessFailures&) = delete;

  /// Adds and removes a group. One without a store is ignored.
  void add(const World& group);
  void remove(const World& group);
  /// `broken` has failed, and blames these ranks of the start-up group. Writes a record for each
  /// other group that has them as members. Blocks for at most one second.
  void tell_others(const World& broken, const std::vector<int>& blamed) noexcept;
  /// A collective of `group` has succeeded, so this process continued after another group's
  /// failure. Removes the record for `group`.
  void withdraw(const World& group) noexcept;

  /// Set when the store has not answered in time.
  std::atomic<bool> store_is_silent = false;

 private:
  struct Group {
    c10::intrusive_ptr<c10d::Store> store;  ///< Each group has its own.
    int rank;
    std::vector<int> world_ranks;
  };

  std::mutex mutex_;
  std::vector<Group> groups_;
  std::vector<Group> told_;  ///< They have this rank's record of another group's failure.
  std::vector<int> blamed_;  ///< Ranks of the start-up group.
  bool serves_ = false;      ///< This rank serves the store.
  std::atomic<bool> any_told_ = false;
};

/// The time that a rank waits for an answer of the store: a tenth of the usual time if the store
/// has not answered this process before. `failures` null: it has answered.
std::chrono::milliseconds limit_of_answer(const ProcessFailures* failures);

}  // namespace tessera::comm
