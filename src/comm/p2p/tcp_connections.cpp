#include "comm/p2p/tcp_connections.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>

// [Note: connections between ranks]
// A pair of ranks connects when one of them posts its first message to the other, so a rank has as
// many connections as it has partners. Both ranks of a pair post, because a message has two ends.
// Of a pair the higher rank connects to the lower one, and all messages use this connection. Until
// that connection exists, the lower rank has one of its own to the higher rank, its watch, which
// carries nothing. The watch ends when the higher rank ends, so the lower rank does not wait for an
// ended rank.
//
// A connection begins with a greeting: the token of the rank that accepts, which the store has told
// to the members alone, and the rank that connects. Other connections are closed. Strangers may
// push out a connection whose greeting has not arrived, so nothing else is sent before the answer
// to the greeting, and a rank without an answer connects again.

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// A cable that is away for a while loses packets of connect(); the system would repeat them ever
// more rarely.
constexpr auto kDialAgain = 2s;
constexpr auto kDialPause = 200ms;
// The connection of a rank that has ended may arrive after the end of its watch.
constexpr auto kWatchGrace = 100ms;
// In this time a rank that got damaged data writes its record.
constexpr auto kRecordTime = 200ms;
// A limit, so that strangers who connect again and again do not keep the thread from the messages.
constexpr int kMostAcceptedAtOnce = 64;

}  // namespace

TcpConnections::TcpConnections(int rank, Socket listener, std::vector<TcpAddress> addresses,
                               Surroundings surroundings)
    : rank_(rank),
      listener_(std::move(listener)),
      addresses_(std::move(addresses)),
      surroundings_(std::move(surroundings)),
      peers_(addresses_.size()),
      strangers_(addresses_[rank].token),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (epoll_.fd() < 0 || wake_.fd() < 0)
    throw std::system_error(errno, std::generic_category(), "epoll");
  watch_events(EPOLL_CTL_ADD, listener_.fd(), EPOLLIN, Source::listener, 0);
  watch_events(EPOLL_CTL_ADD, wake_.fd(), EPOLLIN, Source::wake, 0);
}

void TcpConnections::post(int peer, Parcel& parcel, bool sending) {
  auto& other = peers_[peer];
  if (sending) other.link.send(parcel);
  else other.link.receive(parcel);
  if (!std::exchange(other.contacted, true) && other.link.is_new()) dial(peer);
  register_link(peer);
}

void TcpConnections::forget(int peer, Parcel& parcel) {
  peers_[peer].link.forget(parcel);
  register_link(peer);
}

std::string TcpConnections::late(int number) const {
  const auto& peer = peers_[number];
  if (peer.link.is_open()) return "timed out waiting for a message over TCP";
  return peer.reason.empty() ? "timed out waiting for a connection over TCP" : peer.reason;
}

bool TcpConnections::was_damaged(int number) {
  auto& peer = peers_[number];
  if (!peer.link.is_damaged()) return false;
  if (!peer.close_at) peer.close_at = surroundings_.now() + kRecordTime;
  has_times_ = true;
  wake();
  return true;
}

void TcpConnections::wake() const { ::eventfd_write(wake_.fd(), 1); }

void TcpConnections::watch_events(int operation, int fd, uint32_t events, Source source,
                                  uint32_t number) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<uint64_t>(source) << 32 | number;
  ::epoll_ctl(epoll_.fd(), operation, fd, &event);
}

void TcpConnections::register_link(int number) {
  auto& peer = peers_[number];
  if (!peer.link.is_open()) {
    peer.registered = 0;
    return;
  }
  const short wanted = peer.link.events();
  const uint32_t events = (wanted & POLLIN ? EPOLLIN : 0u) | (wanted & POLLOUT ? EPOLLOUT : 0u);
  if (events == peer.registered) return;
  // Without events the socket leaves epoll, which would report its end again and again.
  watch_events(events == 0            ? EPOLL_CTL_DEL
               : peer.registered == 0 ? EPOLL_CTL_ADD
                                      : EPOLL_CTL_MOD,
               peer.link.fd(), events, Source::link, static_cast<uint32_t>(number));
  peer.registered = events;
}

/// Connects to a peer, without blocking.
void TcpConnections::dial(int number) {
  auto& peer = peers_[number];
  peer.dial_at.reset();
  peer.state = Peer::connecting;
  peer.dialled_since = surroundings_.now();
  try {
    peer.dial = surroundings_.connect(addresses_[number]);
    watch_events(EPOLL_CTL_ADD, peer.dial.fd(), EPOLLOUT, Source::dial,
                 static_cast<uint32_t>(number));
  } catch (const std::system_error& error) {
    dial_failed(number, error.code().value());
  }
  has_times_ = true;
  wake();  // the thread looks at the times
}

void TcpConnections::dial_failed(int number, int error) {
  auto& peer = peers_[number];
  peer.dial = Socket();
  peer.reason = fmt::format("cannot connect to {}:{}: {}", addresses_[number].host,
                            addresses_[number].port, std::strerror(error));
  has_times_ = true;
  // A rank listens from before the roll call until it ends. Other errors may be the network's.
  if (error == ECONNREFUSED || error == EMFILE || error == ENFILE) dial_lost(number);
  else peer.dial_at = surroundings_.now() + kDialPause;
}

/// The peer has ended, or its connection is on the way.
void TcpConnections::dial_lost(int number) {
  auto& peer = peers_[number];
  peer.dial = Socket();
  if (is_link_dialler(number)) {
    peer.link.end(peer.reason);
    register_link(number);
  } else {
    peer.lost_at = surroundings_.now() + kWatchGrace;
    has_times_ = true;
  }
}

void TcpConnections::greet(int number) {
  auto& peer = peers_[number];
  if (const int error = error_of(peer.dial)) return dial_failed(number, error);
  prepare_connection(peer.dial.fd());
  peer.state = Peer::greeted;
  watch_events(EPOLL_CTL_MOD, peer.dial.fd(), EPOLLIN, Source::dial, static_cast<uint32_t>(number));
  const auto greeting =
      bytes_of({rank_, is_link_dialler(number) ? Greeting::link : Greeting::watch},
               addresses_[number].token);
  ::send(peer.dial.fd(), greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void TcpConnections::on_dial(int number) {
  auto& peer = peers_[number];
  if (peer.dial.fd() < 0) return;
  if (peer.state == Peer::connecting) return greet(number);
  char byte = 0;
  const auto got = ::recv(peer.dial.fd(), &byte, 1, MSG_DONTWAIT);
  if (got < 0 && is_temporary(errno)) return;
  if (peer.state == Peer::greeted && (got <= 0 || (byte != kLinkWelcome && byte != kLinkRefusal)))
    return dial_failed(number, got < 0 ? errno : ECONNRESET);
  if (peer.state == Peer::answered || byte == kLinkRefusal) {  // the end of a watch
    peer.reason = "the connection was closed by the peer";
    return dial_lost(number);
  }
  peer.state = Peer::answered;
  if (!is_link_dialler(number)) return;
  watch_events(EPOLL_CTL_DEL, peer.dial.fd(), 0, Source::dial, 0);
  peer.link.open(std::exchange(peer.dial, Socket()), "");
  register_link(number);
}

void TcpConnections::accept_some() {
  for (int i = 0; i < kMostAcceptedAtOnce; ++i) {
    Socket socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.fd() < 0) {
      if (errno != EMFILE && errno != ENFILE) return;
      // Without a file descriptor left, the listener would be reported again at once.
      if (!strangers_.close_oldest()) return std::this_thread::sleep_for(10ms);
      continue;
    }
    prepare_connection(socket.fd());
    const uint32_t number = strangers_.add(std::move(socket), surroundings_.now());
    watch_events(EPOLL_CTL_ADD, strangers_.fd(number), EPOLLIN, Source::stranger, number);
    has_times_ = true;
    on_stranger(number);  // its greeting may be there already
  }
}

void TcpConnections::on_stranger(uint32_t number) {
  auto newcomer = strangers_.read(number);
  if (!newcomer) return;
  const int rank = newcomer->greeting.rank;
  if (rank <= rank_ || rank >= static_cast<int>(peers_.size()) || !peers_[rank].link.is_new()) {
    ::send(newcomer->socket.fd(), &kLinkRefusal, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    return;
  }
  watch_events(EPOLL_CTL_DEL, newcomer->socket.fd(), 0, Source::stranger, 0);
  welcome(rank, std::move(newcomer->socket));
}

void TcpConnections::welcome(int number, Socket socket) {
  auto& peer = peers_[number];
  peer.link.open(std::move(socket), std::string(1, kLinkWelcome));
  peer.dial = Socket();
  peer.dial_at.reset();
  peer.lost_at.reset();
  read(number);
  register_link(number);
}

void TcpConnections::read(int number) {
  try {
    peers_[number].link.read();
  } catch (const std::exception& error) {  // out of memory
    peers_[number].link.end(error.what());
  }
}

TcpConnections::TimePoint TcpConnections::do_what_is_due_for(int number, TimePoint now) {
  auto& peer = peers_[number];
  const bool connects = peer.dial.fd() >= 0 && peer.state == Peer::connecting;
  if (connects && now >= peer.dialled_since + kDialAgain) dial_failed(number, ETIMEDOUT);
  if (peer.dial_at && now >= *peer.dial_at) dial(number);
  if (peer.lost_at && now >= *peer.lost_at) {
    peer.lost_at.reset();
    peer.link.end(peer.reason);
    register_link(number);
  }
  if (peer.close_at && now >= *peer.close_at) {
    peer.close_at.reset();
    peer.link.close();
    register_link(number);
  }
  auto next = TimePoint::max();
  if (peer.dial.fd() >= 0 && peer.state == Peer::connecting) next = peer.dialled_since + kDialAgain;
  for (const auto& time : {peer.dial_at, peer.lost_at, peer.close_at})
    if (time) next = std::min(next, *time);
  return next;
}

int TcpConnections::do_what_is_due() {
  if (!std::exchange(has_times_, false)) return -1;
  const auto now = surroundings_.now();
  auto next = strangers_.close_late(now);
  for (int number = 0; number < static_cast<int>(peers_.size()); ++number)
    next = std::min(next, do_what_is_due_for(number, now));
  if (next == TimePoint::max()) return -1;
  has_times_ = true;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - surroundings_.now());
  return static_cast<int>(std::max<int64_t>(0, left.count()));
}

void TcpConnections::on_event(const epoll_event& event) {
  const auto number = static_cast<uint32_t>(event.data.u64);
  const int peer = static_cast<int>(number);
  switch (static_cast<Source>(event.data.u64 >> 32)) {
    case Source::listener:
      return accept_some();
    case Source::stranger:
      return on_stranger(number);
    case Source::dial:
      return on_dial(peer);
    case Source::link:
      if (event.events & ~EPOLLIN) peers_[peer].link.write();
      if (event.events & ~EPOLLOUT) read(peer);
      return register_link(peer);
    case Source::wake: {
      eventfd_t count;
      ::eventfd_read(wake_.fd(), &count);
    }
  }
}

}  // namespace tessera::comm
