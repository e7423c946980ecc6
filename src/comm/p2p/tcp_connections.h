#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <sys/epoll.h>

#include "comm/p2p/tcp_link.h"
#include "comm/p2p/tcp_strangers.h"
#include "comm/store/socket.h"

namespace tessera::comm {

/// The connections of a member with the others, and the messages on them. Does nothing by itself:
/// the caller waits for events and passes them on. Not thread-safe, except wait(); never blocks
/// otherwise.
class TcpConnections {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  /// The functions that a test replaces.
  struct Surroundings {
    std::function<TimePoint()> now = std::chrono::steady_clock::now;
    std::function<Socket(const TcpAddress&)> connect = [](const TcpAddress& address) {
      return begin_to_connect(address.host, address.port);
    };
  };

  TcpConnections(int rank, Socket listener, std::vector<TcpAddress> addresses,
                 Surroundings surroundings);

  /// Parcels must stay until they are complete or forget() was called.
  void post(int peer, Parcel& parcel, bool sending);
  void forget(int peer, Parcel& parcel);
  /// The known reason why no message of this peer moves.
  std::string late(int peer) const;
  /// True if a message of this peer was damaged on the way. The caller learns of it; the connection
  /// is closed soon, after the caller has told the others.
  bool was_damaged(int peer);

  /// Blocks until there are events or `timeout` ms have passed (-1: no limit). Any thread.
  int wait(epoll_event* events, int most, int timeout) const {
    return ::epoll_wait(epoll_.fd(), events, most, timeout);
  }
  /// Makes wait() return. Any thread.
  void wake() const;
  void on_event(const epoll_event& event);
  /// Does the work that is due. Returns the ms until further work is due; -1: there is none.
  int do_what_is_due();

 private:
  enum class Source : uint32_t { listener, wake, stranger, link, dial };

  struct Peer {
    TcpLink link;
    bool contacted = false;
    uint32_t registered = 0;  // events of the link that epoll reports
    Socket dial;              // to the peer; becomes the link, or is the watch
    enum { connecting, greeted, answered } state = connecting;  // of `dial`
    TimePoint dialled_since;
    std::optional<TimePoint> dial_at;   // connects again then
    std::optional<TimePoint> lost_at;   // the watch ended; a link may still arrive till then
    std::optional<TimePoint> close_at;  // a damaged link
    std::string reason;                 // of the last failure of `dial`
  };

  bool is_link_dialler(int peer) const { return rank_ > peer; }
  void watch_events(int operation, int fd, uint32_t events, Source source, uint32_t number);
  void register_link(int number);
  void dial(int number);
  void dial_failed(int number, int error);
  void dial_lost(int number);
  void on_dial(int number);
  void greet(int number);
  void accept_some();
  void on_stranger(uint32_t number);
  void welcome(int number, Socket socket);
  void read(int number);
  TimePoint do_what_is_due_for(int number, TimePoint now);

  const int rank_;
  const Socket listener_;
  const std::vector<TcpAddress> addresses_;
  const Surroundings surroundings_;
  std::vector<Peer> peers_;
  TcpStrangers strangers_;
  bool has_times_ = false;  // a peer or a stranger has one
  const Socket epoll_, wake_;
};

}  // namespace tessera::comm
