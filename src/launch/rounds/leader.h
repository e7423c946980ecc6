#pragma once

#include <map>
#include <set>
#include <string>

#include "launch/restarts.h"
#include "launch/rounds/documents.h"
#include "tessera/launch.h"

namespace tessera::launch {

/// The decisions of node 0, without threads and sockets: from documents and the time to an order.
///
///   gathering --all expected hosts are ready, or at least MIN and the others lost--> running
///   running --a failure, a stop, a further host, a lost host--> ending
///   running --all ranks ended with code 0--> over
///   ending --all hosts of the round have ended it, or are lost--> gathering or over
///
/// A host is lost when its launcher has left, was started again, or was silent for
/// --rejoin-timeout. Hosts of the last round are expected; in the first round all MAX hosts are.
class Leader {
 public:
  using Clock = Restarts::Clock;

  /// `options` must outlive the leader.
  Leader(const LaunchOptions& options, std::string settings, Clock::time_point now);

  /// A document that is in the store.
  void hear(const NodeDocument& document, Clock::time_point now);
  const Order& step(Clock::time_point now);
  /// No other launcher needs the store any more.
  bool all_left(Clock::time_point now) const;

 private:
  enum class Phase { gathering, running, ending, over };
  struct Known {
    NodeDocument document;
    Clock::time_point heard;
  };

  void gather(Clock::time_point now);
  void watch(Clock::time_point now);
  void decide(Clock::time_point now);
  void begin(const std::set<int>& nodes, Clock::time_point now);
  void end_round(Order::Kind kind, std::string text);
  void gather_again(Clock::time_point now, std::chrono::milliseconds delay);
  void finish(std::string text);

  const Known* known(int node) const;
  bool heard_within(int node, std::chrono::milliseconds time, Clock::time_point now) const;
  /// The reason why a host of the round is lost; empty if it is not.
  std::string loss_of(size_t place, Clock::time_point now) const;
  bool has_ended(size_t place) const;
  std::set<int> ready(Clock::time_point now) const;

  const LaunchOptions& options_;
  const int least_;
  const std::chrono::milliseconds patience_;
  const Clock::time_point start_;
  Phase phase_ = Phase::gathering;
  std::map<int, Known> known_;
  std::set<int> expected_;
  Clock::time_point not_before_;
  Restarts restarts_;
  std::string failure_;  ///< The end of the round, if a host was lost.
  Order order_;
};

/// "node 1 (host7)"; "node 1" if nothing of it is known.
std::string name_of_node(int node, const std::string& host);

}  // namespace tessera::launch
