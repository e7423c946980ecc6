#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "comm/execution/queue.h"
#include "tessera/process_group.h"

namespace tessera::comm {

/// The counters of a group on this rank, which the groups of ProcessGroup::duplicate() share.
/// Thread-safe.
class Traffic {
 public:
  void count(CollectiveStats CommStats::*kind, uint64_t sent, uint64_t received) {
    std::lock_guard lock(mutex_);
    auto& entry = stats_.*kind;
    ++entry.calls;
    entry.bytes_sent += sent;
    entry.bytes_received += received;
  }

  CommStats snapshot() {
    std::lock_guard lock(mutex_);
    CommStats stats = stats_;
    stats.waited_seconds = std::chrono::duration<double>(clock_->total()).count();
    return stats;
  }

  void reset() {
    std::lock_guard lock(mutex_);
    stats_ = {};
    clock_->reset();
  }

  const std::shared_ptr<WaitClock>& clock() const { return clock_; }

 private:
  std::mutex mutex_;
  CommStats stats_;
  std::shared_ptr<WaitClock> clock_ = std::make_shared<WaitClock>();
};

}  // namespace tessera::comm
