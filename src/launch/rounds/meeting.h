#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "launch/fd.h"
#include "launch/rounds/documents.h"
#include "tessera/launch.h"

namespace tessera::launch {

class Contact;

/// This launcher's part in the meeting of the launchers of several hosts: it writes this host's
/// state into the store of node 0 and reads the orders, in a thread of its own. On node 0 it also
/// serves the store, at --master-port + 1, and gives the orders (Leader).
class Meeting : public RoundOrders {
 public:
  /// Returns at once, except on node 0, which first begins to serve. Throws UsageError if it cannot
  /// serve or cannot read the secret.
  explicit Meeting(const LaunchOptions& options);
  /// Tells the others that this launcher ends. Node 0 waits a few seconds for those that read its
  /// last order. If node 0 does not answer, it blocks for two seconds.
  ~Meeting() override;
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  /// Readable when there is a new order or an error. take() empties it.
  int fd() const override { return news_.get(); }
  /// The current order. Throws UsageError if this launcher cannot join: another secret, other flags
  /// than node 0, a node rank that another launcher has. Throws BrokenWorldError if node 0 is lost.
  Order take();
  /// The loss of node 0 is an order of kind fail.
  std::optional<Order> end_of_round() override;

  /// This host's node rank in the round that is to be started; -1 if `order` does not include it.
  int place_in(const Order& order) const;
  /// A round has begun here.
  void begin(int round);
  /// All ranks of the round have ended here.
  void end(NodeDocument::End how, std::string text, bool cause_known, bool final);

 private:
  void run();
  void publish(std::unique_lock<std::mutex>& lock);

  const LaunchOptions& options_;
  Fd news_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  NodeDocument own_;
  Order order_;
  std::exception_ptr error_;
  bool changed_ = true, stopping_ = false;
  std::unique_ptr<Contact> contact_;
  std::thread thread_;
};

}  // namespace tessera::launch
