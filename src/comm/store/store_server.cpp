#include "comm/store/store_server.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

constexpr size_t kMostReports = 16;
constexpr int kMostAcceptedAtOnce = 64;
constexpr std::chrono::milliseconds kAcceptPause{100};

/// Blocks all signals on this thread while alive. A thread that starts meanwhile inherits the mask,
/// so the program's own threads handle the signals.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &former_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &former_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t former_;
};

bool lacks_files(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

/// Not through spdlog: the server's thread may still run after the program's statics are destroyed.
void print_line(const std::string& line) {
  std::fputs(fmt::format("tessera: {}\n", line).c_str(), stderr);
}

std::vector<std::string> addresses_to_listen_on(const Caller& caller, const std::string& name) {
  auto resolved = resolve_master_address(name, 0, caller);
  for (const auto& address : resolved) {
    if (address == "0.0.0.0" || address == "::")
      throw UsageError(fmt::format(
          "{0}: {1} 0: MASTER_ADDR is '{2}'; expected the address, or a name, of one interface of "
          "the host of {1} 0, at which the other {1}s reach it",
          caller.component, caller.noun, name));
  }
  return listening_addresses(std::move(resolved), outward_address());
}

}  // namespace

StoreServer::StoreServer(std::vector<Socket> listeners, Options options)
    : options_(std::move(options)),
      listeners_(std::move(listeners)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_.fd() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  const SignalsBlocked inherited;
  thread_ = std::thread([this] { run(); });
}

StoreServer::~StoreServer() {
  ::eventfd_write(wake_.fd(), 1);
  thread_.join();
}

std::vector<std::string> StoreServer::reported() const {
  std::lock_guard lock(mutex_);
  return reported_;
}

void StoreServer::run() {
  for (;;) {
    try {
      if (!wait_for_events()) return;
      for (const size_t i : ready_listeners_) accept_from(listeners_[i]);
      answer_waiting();
      remove_finished();
      limit_strangers(options_.most_strangers);
    } catch (const std::exception&) {
      connections_.clear();  // out of memory: the ranks get an error
    }
  }
}

bool StoreServer::wait_for_events() {
  std::vector<pollfd> entries{{wake_.fd(), POLLIN, 0}};
  const bool accepts = Clock::now() >= accept_after_;
  auto next = accepts ? Clock::time_point::max() : accept_after_;
  for (const auto& listener : listeners_)
    entries.push_back({accepts ? listener.fd() : -1, POLLIN, 0});
  for (auto& connection : connections_) {
    auto& session = connection.session;
    // A member that does not read its reply cannot make another request.
    const short events = session.output().empty() ? POLLIN : POLLOUT;
    entries.push_back({connection.socket.fd(), events, 0});
    if (!session.is_member()) next = std::min(next, connection.since + options_.handshake_limit);
  }
  int wait = -1;
  if (next != Clock::time_point::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
    wait = static_cast<int>(std::max<int64_t>(left, 0));
  }
  if (::poll(entries.data(), entries.size(), wait) < 0)
    for (auto& entry : entries) entry.revents = 0;
  if (entries[0].revents) return false;
  ready_listeners_.clear();
  auto entry = entries.begin() + 1;
  for (size_t i = 0; i < listeners_.size(); ++i)
    if ((entry++)->revents) ready_listeners_.push_back(i);
  for (auto& connection : connections_) serve(connection, (entry++)->revents);
  return true;
}

void StoreServer::serve(Connection& connection, short events) {
  if (!events) return;
  if (connection.session.output().empty()) read(connection);
  write(connection);
  if (!connection.session.complaint().empty()) report(connection);
}

void StoreServer::read(Connection& connection) {
  char bytes[1 << 16];
  const auto size = ::recv(connection.socket.fd(), bytes, sizeof bytes, 0);
  if (size > 0) connection.session.feed({bytes, static_cast<size_t>(size)});
  else connection.broken |= size == 0 || !is_temporary(errno);
}

void StoreServer::write(Connection& connection) {
  auto& output = connection.session.output();
  if (output.empty()) return;
  const auto sent = ::send(connection.socket.fd(), output.data(), output.size(), MSG_NOSIGNAL);
  if (sent > 0) output.erase(0, static_cast<size_t>(sent));
  else connection.broken |= sent < 0 && !is_temporary(errno);
}

void StoreServer::answer_waiting() {
  if (answered_version_ == table_.version()) return;
  answered_version_ = table_.version();
  for (auto& connection : connections_) {
    connection.session.answer_waiting();
    write(connection);
  }
}

void StoreServer::report(const Connection& connection) {
  auto line = fmt::format("the store of {} 0 refused a connection from {}: {}", options_.gate.noun,
                          connection.peer, connection.session.complaint());
  {
    std::lock_guard lock(mutex_);
    if (reported_.size() >= kMostReports ||
        std::find(reported_.begin(), reported_.end(), line) != reported_.end())
      return;
    reported_.push_back(line);
  }
  options_.report(line);
}

void StoreServer::remove_finished() {
  const auto late = Clock::now() - options_.handshake_limit;
  connections_.remove_if([&](Connection& connection) {
    auto& session = connection.session;
    const bool finished = session.dropped() && session.output().empty();
    return connection.broken || finished || (!session.is_member() && connection.since <= late);
  });
}

void StoreServer::accept_from(const Socket& listener) {
  for (int i = 0; i < kMostAcceptedAtOnce; ++i) {
    Socket socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.fd() < 0) {
      if (!lacks_files(errno)) return;
      const size_t before = strangers();
      limit_strangers(before / 4);
      if (before == 0) accept_after_ = Clock::now() + kAcceptPause;
      return;
    }
    prepare_connection(socket.fd());
    auto& connection = connections_.emplace_back(std::move(socket), options_.gate, table_);
    serve(connection, POLLIN);  // a rank's hello is usually there already
  }
}

size_t StoreServer::strangers() const {
  return std::count_if(connections_.begin(), connections_.end(),
                       [](const auto& connection) { return !connection.session.is_member(); });
}

void StoreServer::limit_strangers(size_t most) {
  // Connections are in the order in which they were accepted.
  for (const bool greeted : {false, true}) {
    const auto counts = [&](const Connection& connection) {
      return !connection.session.is_member() && connection.session.greeted() == greeted;
    };
    size_t left = std::count_if(connections_.begin(), connections_.end(), counts);
    for (auto at = connections_.begin(); left > most;) {
      const bool goes = counts(*at);
      at = goes ? connections_.erase(at) : std::next(at);
      left -= goes;
    }
  }
}

ServedStore serve_store(const Caller& caller, const std::string& master_address, int port,
                        const std::string& port_name, Session::Gate gate) {
  ServedStore served;
  served.addresses = addresses_to_listen_on(caller, master_address);
  try {
    served.server = std::make_shared<StoreServer>(
        listen_at(served.addresses, port),
        StoreServer::Options{.gate = std::move(gate), .report = print_line});
  } catch (const std::system_error& error) {
    const bool absent = error.code() == std::errc::address_not_available;
    throw UsageError(fmt::format(
        "{}: {} 0 cannot serve the store at MASTER_ADDR:{} = {}:{} on {}: {}; expected {}",
        caller.component, caller.noun, port_name, master_address, port,
        fmt::join(served.addresses, ", "), error.code().message(),
        absent ? fmt::format("the address, or a name, of an interface of the host of {} 0, on "
                             "which the store listens",
                             caller.noun)
               : "a free port"));
  }
  return served;
}

}  // namespace tessera::comm
