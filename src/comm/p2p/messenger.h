#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/base/failure_ledger.h"
#include "comm/base/transport.h"
#include "comm/base/world.h"
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

  const char* name() const { return mailbox_->name(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
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
  /// `here`: this host's ranks have found it among themselves.
  [[noreturn]] void fail(const std::vector<int>& suspects, const std::string& cause,
                         bool here = false);
  bool has_failed() const { return failed_; }
  Transport::Sent sent() const { return {messages_sent_, bytes_sent_}; }

 private:
  struct Flying {
    at::Tensor tensor;  // declared before the message because it must outlive it
    std::unique_ptr<Message> message;
    int peer;
  };

  Ticket post(at::Tensor tensor, int peer, int part, bool sending);

  std::unique_ptr<Mailbox> mailbox_;
  FailureLedger ledger_;
  int rank_, size_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::string operation_;
  std::chrono::steady_clock::time_point deadline_;
  int tag_ = 0, next_tag_ = 0;
  std::mutex mutex_;  // guards flying_ and aborted_, which abort() uses
  std::vector<Flying> flying_;
  bool aborted_ = false, failed_ = false;
  std::atomic<uint64_t> messages_sent_ = 0, bytes_sent_ = 0;
};

}  // namespace tessera::comm
