#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/failures/failure_ledger.h"
#include "comm/p2p/liveness.h"
#include "comm/p2p/mailbox.h"

namespace tessera::comm {

/// The messages of one collective at a time. A message that fails or is late is a BrokenWorldError
/// that names the rank to blame. One thread, except abort().
class Messenger {
 public:
  using Ticket = size_t;

  /// `grace`: see FailureLedger.
  Messenger(const World& world, std::unique_ptr<Mailbox> mailbox,
            std::chrono::milliseconds grace = std::chrono::milliseconds(300));
  ~Messenger();

  const char* name() const { return mailbox_->name(); }
  void set_timeout(std::chrono::milliseconds timeout) { former_ = timeout_.exchange(timeout); }
  /// If `silence` is shorter than the time-out: until the next call, ranks show each other that
  /// they run (see Liveness), and a rank that is silent for `silence` ends the waits. Then, after
  /// the records were written, calls `on_loss` from another thread. Needs a store.
  void set_silence(std::chrono::milliseconds silence, std::function<void()> on_loss = {});
  /// Begins `operation`, whose name appears in messages; its time-out runs from now.
  void begin(std::string operation);
  /// Posts a message. The tensor is contiguous and must not change before wait() or finish(). Of
  /// messages between the same ranks those with the same `part` arrive in order.
  Ticket send(at::Tensor tensor, int peer, int part = 0);
  Ticket receive(at::Tensor tensor, int peer, int part = 0);
  /// Blocks until the message is complete, and releases its tensor.
  void wait(Ticket ticket);
  /// Waits for everything posted since begin().
  void finish();
  /// Gathers the blocks of n = members.size() ranks on each of them, in ceil(log2 n) rounds of one
  /// message (Bruck et al. 1997). `table` is 1-D; block i, that of rank members[i], follows block
  /// i - 1 and has counts[i] elements. This rank's block is filled in. Each member calls it, after
  /// begin().
  void gather_blocks(const at::Tensor& table, const std::vector<int64_t>& counts,
                     const std::vector<int>& members);
  /// Makes a blocked call and every later call throw. From any thread.
  void abort() noexcept;

  /// Records that `suspects` are missing in the current operation, and throws the BrokenWorldError.
  /// `here`: this host's ranks have found it among themselves. `damage`: the suspects are this rank
  /// and one whose data arrived damaged.
  [[noreturn]] void fail(const std::vector<int>& suspects, const std::string& cause,
                         bool here = false, bool damage = false);
  bool has_failed() const { return failed_; }
  /// True if Liveness has found a loss.
  bool has_lost() const { return lost_; }
  Transport::Sent sent() const { return {sent_.messages, sent_.bytes}; }

 private:
  struct Flying {
    at::Tensor tensor;  // declared before the message because it must outlive it
    std::unique_ptr<Message> message;
    int peer;
  };

  Ticket post(at::Tensor tensor, int peer, int part, bool sending);
  void lose(std::vector<int> ranks, const std::function<void()>& on_loss);
  /// The ranks to blame, which the first failure of the group has found.
  std::vector<int> resolve(const std::vector<int>& suspects, FailureLedger::Cause cause);

  struct Collective {
    std::string name;
    std::chrono::steady_clock::time_point deadline;
    int tag = 0, next_tag = 0;
  };
  /// The first failure of the group.
  struct Failure {
    std::string text;
    std::mutex mutex;  // guards `blamed`
    std::optional<std::vector<int>> blamed;
  };

  std::unique_ptr<Mailbox> mailbox_;
  FailureLedger ledger_;
  int rank_, size_;
  std::atomic<std::chrono::milliseconds> timeout_, former_;
  Collective collective_;  // the current one
  std::mutex mutex_;       // guards flying_, and what abort() changes
  std::vector<Flying> flying_;
  std::atomic<bool> aborted_ = false;
  std::atomic<bool> failed_ = false, lost_ = false;
  Failure failure_;
  struct {
    std::atomic<uint64_t> messages = 0, bytes = 0;
  } sent_;
  LivenessPeriods liveness_;  // the last member, because its threads use the others
};

}  // namespace tessera::comm
