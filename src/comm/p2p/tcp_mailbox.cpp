#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "comm/base/roll_call.h"
#include "comm/base/sigpipe_blocked.h"
#include "comm/p2p/mailbox.h"
#include "comm/p2p/tcp_greeting.h"
#include "comm/p2p/tcp_link.h"
#include "comm/p2p/tcp_strangers.h"
#include "comm/store/socket.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

// [Note: connections between ranks]
// A pair of ranks connects when one of them posts its first message to the other, so a rank has as
// many connections as it has partners. Both ranks of a pair post, because a message has two ends.
// Of a pair the higher rank connects to the lower one, and all messages use this connection. Until
// it is there, the lower rank has a connection of its own to the higher one, its watch, which
// carries nothing: it ends when the higher rank does, so the lower rank does not wait for a rank
// that is gone.
//
// A connection begins with a greeting: the token of the rank that accepts, which the store has told
// to the members alone, and the rank that connects. Other connections are closed.

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// A cable that is away for a while loses packets of connect(); the system would repeat them ever
// more rarely.
constexpr auto kDialAgain = 2s;
constexpr auto kDialPause = 200ms;
// The connection of a rank that has ended may arrive after the end of its watch.
constexpr auto kWatchGrace = 100ms;

class TcpMailbox;

class TcpMessage : public Message {
 public:
  TcpMessage(TcpMailbox& mailbox, int peer, const at::Tensor& tensor, int tag)
      : mailbox_(mailbox), peer_(peer) {
    parcel_.data = static_cast<char*>(tensor.data_ptr());
    parcel_.bytes = tensor.nbytes();
    parcel_.tag = tag;
  }
  ~TcpMessage() override;
  void wait(std::chrono::milliseconds timeout) override;
  void abort() noexcept override;
  Parcel& parcel() { return parcel_; }

 private:
  TcpMailbox& mailbox_;
  const int peer_;
  Parcel parcel_;
};

class TcpMailbox : public Mailbox {
 public:
  TcpMailbox(int rank, Socket listener, std::vector<TcpAddress> addresses)
      : rank_(rank),
        listener_(std::move(listener)),
        addresses_(std::move(addresses)),
        peers_(addresses_.size()),
        strangers_(addresses_[rank].token),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (epoll_.fd() < 0 || wake_.fd() < 0)
      throw std::system_error(errno, std::generic_category(), "epoll");
    watch_events(EPOLL_CTL_ADD, listener_.fd(), EPOLLIN, Source::listener, 0);
    watch_events(EPOLL_CTL_ADD, wake_.fd(), EPOLLIN, Source::wake, 0);
    const SigpipeBlocked inherited;
    thread_ = std::thread([this] { run(); });
  }

  ~TcpMailbox() override {
    ending_ = true;
    ::eventfd_write(wake_.fd(), 1);
    thread_.join();
  }

  const char* name() const override { return "tcp"; }

  std::unique_ptr<Message> send(at::Tensor tensor, int to, int tag) override {
    return post(tensor, to, tag, true);
  }
  std::unique_ptr<Message> receive(at::Tensor tensor, int from, int tag) override {
    return post(tensor, from, tag, false);
  }

 private:
  friend class TcpMessage;

  enum class Source : uint32_t { listener, wake, stranger, link, dial };

  struct Peer {
    TcpLink link;
    bool contacted = false;
    uint32_t registered = 0;  // events of the link that epoll reports
    Socket dial;              // to the peer; becomes the link, or is the watch
    bool dialled = false;     // `dial` is connected
    Clock::time_point dialled_since;
    std::optional<Clock::time_point> dial_at;  // connects again then
    std::optional<Clock::time_point> lost_at;  // the watch ended; a link may still arrive till then
    std::string reason;                        // of the last failure of `dial`
  };

  bool is_link_dialler(int peer) const { return rank_ > peer; }

  std::unique_ptr<Message> post(const at::Tensor& tensor, int peer, int tag, bool sending) {
    auto& other = peers_[peer];
    auto message = std::make_unique<TcpMessage>(*this, peer, tensor, tag);
    std::lock_guard lock(mutex_);
    if (sending) other.link.send(message->parcel());
    else other.link.receive(message->parcel());
    if (!std::exchange(other.contacted, true) && other.link.is_new()) dial(peer);
    register_link(peer);
    return message;
  }

  void forget(int peer, Parcel& parcel) {
    std::lock_guard lock(mutex_);
    if (parcel.complete) return;
    peers_[peer].link.forget(parcel);
    register_link(peer);
  }

  /// Why no message of this peer moves, as far as it is known.
  std::string late(int number) const {
    const auto& peer = peers_[number];
    if (peer.link.is_open()) return "timed out waiting for a message over TCP";
    return peer.reason.empty() ? "timed out waiting for a connection over TCP" : peer.reason;
  }

  void watch_events(int operation, int fd, uint32_t events, Source source, uint32_t number) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = static_cast<uint64_t>(source) << 32 | number;
    ::epoll_ctl(epoll_.fd(), operation, fd, &event);
  }

  void register_link(int number) {
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
  void dial(int number) {
    auto& peer = peers_[number];
    peer.dial_at.reset();
    peer.dialled = false;
    peer.dialled_since = Clock::now();
    try {
      peer.dial = begin_to_connect(addresses_[number].host, addresses_[number].port);
      watch_events(EPOLL_CTL_ADD, peer.dial.fd(), EPOLLOUT, Source::dial,
                   static_cast<uint32_t>(number));
    } catch (const std::system_error& error) {
      dial_failed(number, error.code().value());
    }
    has_times_ = true;
    ::eventfd_write(wake_.fd(), 1);  // the thread looks at the times
  }

  void dial_failed(int number, int error) {
    auto& peer = peers_[number];
    peer.dial = Socket();
    peer.reason = fmt::format("cannot connect to {}:{}: {}", addresses_[number].host,
                              addresses_[number].port, std::strerror(error));
    // A rank listens from before the roll call until it ends. Other errors may be the network's.
    if (error == ECONNREFUSED || error == EMFILE || error == ENFILE) dial_lost(number);
    else peer.dial_at = Clock::now() + kDialPause;
  }

  /// The peer has ended, or its connection is on the way.
  void dial_lost(int number) {
    auto& peer = peers_[number];
    peer.dial = Socket();
    if (is_link_dialler(number)) {
      peer.link.end(peer.reason);
      register_link(number);
    } else {
      peer.lost_at = Clock::now() + kWatchGrace;
      has_times_ = true;
    }
  }

  void on_dial(int number) {
    auto& peer = peers_[number];
    if (peer.dial.fd() < 0) return;
    if (peer.dialled) {  // a watch on which nothing arrives but its end
      char byte;
      const auto got = ::recv(peer.dial.fd(), &byte, 1, MSG_DONTWAIT);
      if (got < 0 && is_temporary(errno)) return;
      peer.reason = "the connection was closed by the peer";
      return dial_lost(number);
    }
    if (const int error = error_of(peer.dial)) return dial_failed(number, error);
    prepare_connection(peer.dial.fd());
    peer.dialled = true;
    const auto kind = is_link_dialler(number) ? Greeting::link : Greeting::watch;
    auto greeting = bytes_of({rank_, kind}, addresses_[number].token);
    if (kind == Greeting::link) {
      watch_events(EPOLL_CTL_DEL, peer.dial.fd(), 0, Source::dial, 0);
      peer.link.open(std::exchange(peer.dial, Socket()), std::move(greeting));
      return register_link(number);
    }
    watch_events(EPOLL_CTL_MOD, peer.dial.fd(), EPOLLIN, Source::dial,
                 static_cast<uint32_t>(number));
    ::send(peer.dial.fd(), greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void accept_all() {
    for (;;) {
      Socket socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (socket.fd() < 0) {
        // Without a file descriptor left, the listener would be reported again at once.
        if (errno == EMFILE || errno == ENFILE) std::this_thread::sleep_for(10ms);
        return;
      }
      prepare_connection(socket.fd());
      const uint32_t number = strangers_.add(std::move(socket));
      watch_events(EPOLL_CTL_ADD, strangers_.fd(number), EPOLLIN, Source::stranger, number);
    }
  }

  void on_stranger(uint32_t number) {
    auto newcomer = strangers_.read(number);
    if (!newcomer) return;
    const int rank = newcomer->greeting.rank;
    if (rank <= rank_ || rank >= static_cast<int>(peers_.size()) || !peers_[rank].link.is_new())
      return;
    watch_events(EPOLL_CTL_DEL, newcomer->socket.fd(), 0, Source::stranger, 0);
    welcome(rank, std::move(newcomer->socket));
  }

  void welcome(int number, Socket socket) {
    auto& peer = peers_[number];
    peer.link.open(std::move(socket), "");
    peer.dial = Socket();
    peer.dial_at.reset();
    peer.lost_at.reset();
    read(number);
    register_link(number);
  }

  void read(int number) {
    try {
      peers_[number].link.read();
    } catch (const std::exception& error) {  // out of memory
      peers_[number].link.end(error.what());
    }
  }

  /// Does what is due. Returns the time until the next such thing in ms; -1: there is none.
  int do_what_is_due() {
    if (!std::exchange(has_times_, false)) return -1;
    const auto now = Clock::now();
    auto next = Clock::time_point::max();
    for (int number = 0; number < static_cast<int>(peers_.size()); ++number) {
      auto& peer = peers_[number];
      if (peer.dial.fd() >= 0 && !peer.dialled && now >= peer.dialled_since + kDialAgain)
        dial_failed(number, ETIMEDOUT);
      if (peer.dial_at && now >= *peer.dial_at) dial(number);
      if (peer.lost_at && now >= *peer.lost_at) {
        peer.lost_at.reset();
        peer.link.end(peer.reason);
        register_link(number);
      }
      if (peer.dial.fd() >= 0 && !peer.dialled)
        next = std::min(next, peer.dialled_since + kDialAgain);
      if (peer.dial_at) next = std::min(next, *peer.dial_at);
      if (peer.lost_at) next = std::min(next, *peer.lost_at);
    }
    if (next == Clock::time_point::max()) return -1;
    has_times_ = true;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
    return static_cast<int>(std::max<int64_t>(0, left.count()));
  }

  void on_event(const epoll_event& event) {
    const auto number = static_cast<uint32_t>(event.data.u64);
    const int peer = static_cast<int>(number);
    switch (static_cast<Source>(event.data.u64 >> 32)) {
      case Source::listener:
        return accept_all();
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

  void run() {
    constexpr int kMostEvents = 16;
    epoll_event events[kMostEvents];
    int wait = -1;
    while (!ending_) {
      const int count = ::epoll_wait(epoll_.fd(), events, kMostEvents, wait);
      for (int i = 0; i < count; ++i) {
        std::lock_guard lock(mutex_);
        on_event(events[i]);
      }
      std::lock_guard lock(mutex_);
      wait = do_what_is_due();
    }
  }

  const int rank_;
  const Socket listener_;
  const std::vector<TcpAddress> addresses_;
  std::mutex mutex_;  // guards what follows, and all parcels
  std::vector<Peer> peers_;
  TcpStrangers strangers_;
  bool has_times_ = false;  // some peer has one
  const Socket epoll_, wake_;
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

TcpMessage::~TcpMessage() { mailbox_.forget(peer_, parcel_); }

void TcpMessage::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mailbox_.mutex_);
  const bool ended = parcel_.ready.wait_for(
      lock, timeout, [&] { return parcel_.complete || !parcel_.failure.empty(); });
  if (!ended) throw std::runtime_error(mailbox_.late(peer_));
  if (!parcel_.complete) throw std::runtime_error(parcel_.failure);
}

void TcpMessage::abort() noexcept {
  std::lock_guard lock(mailbox_.mutex_);
  if (parcel_.complete) return;
  parcel_.failure = "aborted";
  parcel_.ready.notify_all();
}

}  // namespace

std::unique_ptr<Mailbox> make_tcp_mailbox(const World& world) {
  const SigpipeBlocked sigpipe;
  const auto broken = [&](const std::string& cause, const std::vector<int>& ranks) {
    return BrokenWorldError(
        fmt::format("ProcessGroup: rank {} of {} could not meet the other ranks over TCP within {} "
                    "ms: {}",
                    world.rank, world.size, world.options.timeout.count(), cause),
        ranks);
  };
  try {
    auto own = own_tcp_address(world);
    auto listener = std::move(listen_at({own.host}, 0).front());
    own.port = port_of(listener);
    return std::make_unique<TcpMailbox>(world.rank, std::move(listener),
                                        exchange_tcp_addresses(world, own));
  } catch (const RanksMissing& missing) {
    throw broken(rank_list(missing.ranks) + " did not arrive", missing.ranks);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw broken(compat::first_line(error.what()), {});
  }
}

}  // namespace tessera::comm
