#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sched.h>

#include "comm/base/roll_call.h"
#include "comm/base/sigpipe_blocked.h"
#include "comm/p2p/mailbox.h"
#include "comm/p2p/striped_mailbox.h"
#include "comm/p2p/tcp_connections.h"
#include "comm/store/addresses.h"
#include "comm/store/secret.h"
#include "tessera/detail/classic.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

class TcpMailbox;

class TcpMessage : public Message {
 public:
  TcpMessage(TcpMailbox& mailbox, int peer, at::Tensor tensor, int tag)
      : mailbox_(mailbox), peer_(peer), tensor_(std::move(tensor)) {
    parcel_.data = static_cast<char*>(tensor_.data_ptr());
    parcel_.bytes = tensor_.nbytes();
    parcel_.tag = tag;
  }
  ~TcpMessage() override;
  void wait(std::chrono::milliseconds timeout) override;
  void abort() noexcept override;
  Parcel& parcel() { return parcel_; }

 private:
  TcpMailbox& mailbox_;
  const int peer_;
  const at::Tensor tensor_;  // has the parcel's memory
  Parcel parcel_;
};

/// Runs TcpConnections in a thread.
class TcpMailbox : public Mailbox {
 public:
  TcpMailbox(int rank, Socket listener, std::vector<TcpAddress> addresses)
      : connections_(rank, std::move(listener), std::move(addresses), {}) {
    const SigpipeBlocked inherited;
    thread_ = std::thread([this] { run(); });
  }

  ~TcpMailbox() override {
    ending_ = true;
    connections_.wake();
    thread_.join();
  }

  const char* name() const override { return "tcp"; }

  std::unique_ptr<Message> send(at::Tensor tensor, int to, int tag) override {
    return post(std::move(tensor), to, tag, true);
  }
  std::unique_ptr<Message> receive(at::Tensor tensor, int from, int tag) override {
    return post(std::move(tensor), from, tag, false);
  }

 private:
  friend class TcpMessage;

  std::unique_ptr<Message> post(at::Tensor tensor, int peer, int tag, bool sending) {
    auto message = std::make_unique<TcpMessage>(*this, peer, std::move(tensor), tag);
    std::lock_guard lock(mutex_);
    connections_.post(peer, message->parcel(), sending);
    return message;
  }

  void run() {
    constexpr int kMostEvents = 16;
    epoll_event events[kMostEvents];
    int wait = -1;
    while (!ending_) {
      const int count = connections_.wait(events, kMostEvents, wait);
      for (int i = 0; i < count; ++i) {
        std::lock_guard lock(mutex_);
        connections_.on_event(events[i]);
      }
      std::lock_guard lock(mutex_);
      wait = connections_.do_what_is_due();
    }
  }

  std::mutex mutex_;  // guards the members below, and all parcels
  TcpConnections connections_;
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

TcpMessage::~TcpMessage() {
  std::lock_guard lock(mailbox_.mutex_);
  if (!parcel_.complete) mailbox_.connections_.forget(peer_, parcel_);
}

void TcpMessage::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mailbox_.mutex_);
  const bool ended = parcel_.ready.wait_for(
      lock, timeout, [&] { return parcel_.complete || !parcel_.failure.empty(); });
  if (!ended) throw std::runtime_error(mailbox_.connections_.late(peer_));
  if (parcel_.complete) return;
  if (mailbox_.connections_.was_damaged(peer_)) throw DamagedMessage(parcel_.failure);
  throw std::runtime_error(parcel_.failure);
}

void TcpMessage::abort() noexcept {
  std::lock_guard lock(mailbox_.mutex_);
  if (parcel_.complete) return;
  parcel_.failure = "aborted";
  parcel_.ready.notify_all();
}

std::string address_to_listen_at(const World& world) {
  if (world.same_host) return "127.0.0.1";
  const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
  if (interface && *interface) return address_of_interface(interface, world.rank);
  if (!world.address.empty()) return world.address;
  const auto outward = outward_address();
  return outward.empty() ? "127.0.0.1" : outward;
}

/// The connections with each other member that this one can use at once.
int most_connections(const World& world, const std::string& address) {
  if (world.same_host) return 1;
  int64_t speed = 0;
  for (const auto& each : network_interfaces())
    if (each.address == address) speed = each.speed;
  const auto& hosts = world.hosts;
  const auto ranks = hosts.empty() ? 1 : std::count(hosts.begin(), hosts.end(), hosts[world.rank]);
  cpu_set_t cores;
  const bool known = ::sched_getaffinity(0, sizeof cores, &cores) == 0;
  return stripes_for(speed, static_cast<int>(ranks), known ? CPU_COUNT(&cores) : 1);
}

/// Tells all members where each listens. The places of all members, as many for each, and at most
/// as many as `own`. Collective. Throws RanksMissing after the time-out.
std::vector<std::vector<TcpAddress>> exchange_addresses(const World& world,
                                                        const std::vector<TcpAddress>& own) {
  std::string text;
  for (const auto& each : own) text += fmt::format("{} {} {} ", each.port, each.token, each.host);
  const auto deadline = std::chrono::steady_clock::now() + world.options.timeout;
  std::vector<std::vector<TcpAddress>> addresses(own.size(), std::vector<TcpAddress>(world.size));
  for (const auto& [rank, written] :
       roll_call(world.store, "tcp", world.rank, world.size, text, deadline)) {
    detail::Classic<std::istringstream> words(written.value);
    size_t count = 0;
    for (TcpAddress one; count < addresses.size() && words >> one.port >> one.token >> one.host;
         ++count)
      addresses[count][rank] = one;
    if (count == 0) throw std::runtime_error(fmt::format("rank {} has told no address", rank));
    addresses.resize(count);
  }
  return addresses;
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
    const auto address = address_to_listen_at(world);
    std::vector<TcpAddress> own(most_connections(world, address));
    std::vector<Socket> listeners;
    for (auto& one : own) {
      one = {address, random_token(kTokenBytes)};
      listeners.push_back(std::move(listen_at({one.host}, 0).front()));
      one.port = port_of(listeners.back());
    }
    std::vector<std::unique_ptr<Mailbox>> mailboxes;
    for (auto& addresses : exchange_addresses(world, own))
      mailboxes.push_back(std::make_unique<TcpMailbox>(
          world.rank, std::move(listeners[mailboxes.size()]), std::move(addresses)));
    return make_striped_mailbox(std::move(mailboxes));
  } catch (const RanksMissing& missing) {
    throw broken(rank_list(missing.ranks) + " did not arrive", missing.ranks);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw broken(compat::first_line(error.what()), {});
  }
}

}  // namespace tessera::comm
