#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/store/addresses.h"
#include "comm/store/session.h"
#include "comm/store/socket.h"

namespace tessera::comm {

/// Serves a store to the ranks of a world, in a thread of its own. A peer must prove that it knows
/// the secret (handshake.h) before it can do anything. Until then it is a stranger: it is
/// disconnected if it sends anything else or needs longer than `handshake_limit`. There are at most
/// `most_strangers` with a hello and as many without; beyond that the oldest are disconnected. So
/// strangers can hardly keep a rank out: 64 must come during one round trip of the rank, and the
/// rank then tries again. Members that are slow or silent do not delay others.
class StoreServer {
 public:
  struct Options {
    Session::Gate gate;
    std::chrono::milliseconds handshake_limit{2000};
    size_t most_strangers = 64;
    /// Called from the server's thread, once for each address and reason, with one line about a
    /// peer that speaks the protocol and was refused. At most 16 times.
    std::function<void(const std::string& line)> report = [](const std::string&) {};
  };

  /// Serves until it is destroyed, which closes all connections.
  StoreServer(std::vector<Socket> listeners, Options options);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;

  /// All lines that were reported. Any thread.
  std::vector<std::string> reported() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    Connection(Socket accepted, const Session::Gate& gate, KeyTable& table)
        : socket(std::move(accepted)), peer(peer_of(socket)), session(gate, table) {}
    Socket socket;
    std::string peer;
    Session session;
    Clock::time_point since = Clock::now();
    bool broken = false;
  };

  void run();
  /// Blocks until there is work; false if the server must end.
  bool wait_for_events();
  void serve(Connection& connection, short events);
  static void read(Connection& connection);
  static void write(Connection& connection);
  void answer_waiting();
  void report(const Connection& connection);
  void remove_finished();
  void accept_from(const Socket& listener);
  size_t strangers() const;
  void limit_strangers(size_t most);

  const Options options_;
  const std::vector<Socket> listeners_;
  Socket wake_;
  KeyTable table_;
  uint64_t answered_version_ = 0;
  std::list<Connection> connections_;
  std::vector<size_t> ready_listeners_;
  Clock::time_point accept_after_{};  ///< Accepting fails until then: too many open files.
  mutable std::mutex mutex_;
  std::vector<std::string> reported_;
  std::thread thread_;
};

/// A store that caller number 0 serves.
struct ServedStore {
  std::shared_ptr<StoreServer> server;
  std::vector<std::string> addresses;  ///< On which it listens.
};

/// Serves a store at MASTER_ADDR, see listening_addresses(), and on `port`, which the message calls
/// `port_name`. Throws UsageError if the address is no interface of this host, or the port is
/// taken. Warns on standard error of each peer that it refuses.
ServedStore serve_store(const Caller& caller, const std::string& master_address, int port,
                        const std::string& port_name, Session::Gate gate);

}  // namespace tessera::comm
