#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/store/socket.h"
#include "sim/schedule.h"

namespace tessera::sim {

using TimePoint = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;

/// A connection that this program carries: what one end writes arrives at the other later, in
/// pieces of any size. It may be cut, and one bit may be flipped, at a given byte of one direction.
class Wire {
 public:
  struct Fault {
    enum Kind { none, flip, cut } kind = none;
    int direction = 0;  ///< 0: what the rank that connects sends.
    int64_t at = 0;     ///< The byte.
  };

  /// `near`: the program's side of the socket of the rank that connects. `listener`: the path of
  /// the rank that accepts.
  Wire(comm::Socket near, std::string listener, int from, int to, Fault fault);

  const int from, to;  ///< The ranks.
  /// Moves what is due at `now`. True if anything happened.
  bool move(TimePoint now, Dice& dice);
  /// When something more is due; max() if nothing is.
  TimePoint next() const;
  bool closed() const { return closed_; }
  /// The fault has happened.
  bool struck() const { return struck_; }
  /// Bytes that have left in this direction.
  int64_t carried(int direction) const { return carried_[direction]; }
  void cut();

 private:
  struct Piece {
    TimePoint at;
    std::string bytes;
    bool end = false;
  };

  bool take(int direction, TimePoint now, Dice& dice);
  bool deliver(int direction, TimePoint now, Dice& dice);

  comm::Socket ends_[2];  // towards the rank that connects, and towards the one that accepts
  std::string listener_;
  Fault fault_;
  std::deque<Piece> pieces_[2];  // by direction
  TimePoint last_[2] = {};
  int64_t carried_[2] = {0, 0};
  bool ended_[2] = {false, false};
  bool connected_ = false, closed_ = false, struck_ = false;
};

/// A socket that listens at a path in the abstract namespace, and one that has connected to it. The
/// second is invalid if nobody listens there.
comm::Socket listen_at_path(const std::string& path);
comm::Socket connect_to_path(const std::string& path);

}  // namespace tessera::sim
