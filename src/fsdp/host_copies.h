#pragma once

#include <mutex>
#include <utility>

#include "comm/base/comm_stream.h"
#include "sharding/detection/page.h"

namespace tessera::fsdp {

/// [Note: shards on the host] With cpu_offload the device reads the shards some time after the copy
/// was issued. The host waits for the copy before shards may change: where a forward without
/// gradients ends, where a backward that reduces ends (there Reductions has waited, as a rule), and
/// before all units are released. A forward with gradients does not wait, because its backward
/// usually comes before the shards change. If it does not, the first operator that takes a shard
/// waits: the shards are on pages of this owner.
class HostCopies : public sharding::PageOwner {
 public:
  explicit HostCopies(const comm::CommStream& stream) : stream_(stream) {}

  /// A copy from shards on the host was issued before `mark`.
  void issued(comm::CommStream::Mark mark) {
    const std::lock_guard lock(mutex_);
    last_ = std::move(mark);
  }
  void wait() {
    const std::lock_guard lock(mutex_);
    const auto copied = std::exchange(last_, nullptr);
    if (!copied || copied->query()) return;
    const comm::CommStream::Scope copies(stream_, copied);  // not for what was computed since
    stream_.wait_for_current();
  }
  void need(c10::ArrayRef<sharding::PageUse> /*uses*/, std::string_view /*op*/) override { wait(); }

 private:
  const comm::CommStream& stream_;
  std::mutex mutex_;
  comm::CommStream::Mark last_;  // null: none is pending
};

}  // namespace tessera::fsdp
