#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "comm/store/store_link.h"
#include "comm/store/store_server.h"
#include "launch/rounds/documents.h"
#include "launch/rounds/leader.h"
#include "tessera/launch.h"

namespace tessera::launch {

/// A launcher's connection to the store of node 0. One thread uses it.
class Contact {
 public:
  using Clock = std::chrono::steady_clock;

  /// On node 0 serves the store. Throws UsageError. Does not connect.
  Contact(const LaunchOptions& options, const std::string& settings);

  /// Writes this launcher's state and returns node 0's order; nullopt if node 0 does not answer
  /// now, or has given no order. On node 0 also reads the documents of the others and decides.
  /// Blocks for at most about two seconds. Throws BrokenWorldError if node 0 was silent for
  /// --rejoin-timeout or its launcher has ended, UsageError if another launcher has this node rank.
  std::optional<Order> exchange(const NodeDocument& own);
  /// On node 0: no other launcher needs the store any more. Elsewhere true.
  bool all_left() const;

 private:
  void connect();
  std::string read(const std::string& key);
  void write(const std::string& key, const std::string& value);
  std::string ask(const comm::StoreMessage& request);
  void check_alone(const NodeDocument& own);
  void lead();
  /// `advice`: the action for the user, or the expected value.
  [[noreturn]] void give_up(const std::string& reason, const std::string& advice) const;
  /// Node 0 was silent for too long; `cause` is the failure of the last request.
  [[noreturn]] void give_up_waiting(const std::string& cause) const;

  const LaunchOptions& options_;
  const std::chrono::milliseconds patience_;
  comm::StorePlace place_;
  comm::ServedStore served_;
  std::unique_ptr<Leader> leader_;
  std::optional<comm::StoreLink> link_;
  Clock::time_point heard_ = Clock::now();
  bool met_ = false;      ///< Node 0 has answered once.
  bool checked_ = false;  ///< No other launcher has this node rank.
  std::string own_name_;  ///< Of this node, for errors.
  std::string rival_;     ///< The document of another launcher with this node rank.
  Clock::time_point rival_until_;
};

}  // namespace tessera::launch
