#pragma once

#include <optional>
#include <string>
#include <vector>

namespace tessera::launch {

// The documents that launchers of several hosts write into their store. A round is one attempt of
// all ranks, on the hosts of that round. Node 0 gives the orders. Both are written as JSON.

/// The state of one launcher, written by itself.
struct NodeDocument {
  /// The way in which its ranks of round `ended` have ended.
  enum class End {
    none,
    done,      ///< All with code 0.
    failed,    ///< A rank failed, here or because of another host.
    stopped,   ///< Because of a signal to this launcher or one of its ranks.
    followed,  ///< Because of an order, or of a signal on another host.
  };

  int node = 0;                ///< --node-rank
  std::string incarnation;     ///< Random, of this process of the launcher.
  int beat = 0;                ///< Changes with every write.
  std::string host;            ///< Name of the host.
  std::string settings;        ///< The flags that must agree on all hosts.
  int ranks = 1;               ///< -n, which may differ between hosts.
  int began = -1, ended = -1;  ///< The last started and the last ended round here.
  End end = End::none;
  bool cause_known = false;  ///< With failed: the failure began here.
  bool final = false;        ///< With failed: a restart is of no use.
  std::string text;          ///< With failed or stopped: the reason.
  bool left = false;         ///< The launcher ends; this is its last document.

  bool ready() const { return !left && began == ended; }
  std::string encode() const;
  /// nullopt if `text` is no document.
  static std::optional<NodeDocument> decode(const std::string& text);
};

/// The order that node 0 gives.
struct Order {
  enum class Kind {
    wait,     ///< For the other hosts.
    begin,    ///< Start the ranks of the round.
    fail,     ///< End the ranks of the round, because one failed.
    regroup,  ///< End the ranks of the round as for SIGTERM, because a further host has arrived.
    stop,     ///< Let the ranks of the round end: a signal has stopped some of them.
    over,     ///< The launchers end; `text` is empty if all ranks ended with code 0.
  };

  Kind kind = Kind::wait;
  int round = -1;
  std::vector<int> nodes;                 ///< Ascending; the order of node ranks.
  std::vector<std::string> incarnations;  ///< Of these nodes.
  std::vector<int> ranks;                 ///< Of these nodes.
  std::string text;                       ///< For the user.
  std::string settings;                   ///< Node 0's.

  /// The position of a launcher among `nodes`; -1 if it is not one of them.
  int place_of(const NodeDocument& launcher) const;
  bool operator==(const Order&) const = default;
  std::string encode() const;
  /// nullopt if `text` is no order.
  static std::optional<Order> decode(const std::string& text);
};

/// The orders that may end a round before its ranks end. This class is the plain case without
/// orders; the class for a Meeting derives from it.
class RoundOrders {
 public:
  virtual ~RoundOrders() = default;
  /// Readable when there is something new; -1: never.
  virtual int fd() const { return -1; }
  /// The order that ends the current round here; nullopt if there is none. Throws nothing; does not
  /// block.
  virtual std::optional<Order> end_of_round() { return std::nullopt; }
};

}  // namespace tessera::launch
