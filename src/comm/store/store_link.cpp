#include "comm/store/store_link.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <random>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <poll.h>

#include "comm/store/addresses.h"
#include "comm/store/handshake.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// One try, of connecting and of the handshake. The store's own limit is shorter.
constexpr std::chrono::milliseconds kConnectLimit{2000}, kHandshakeLimit{3000};

/// A failure that may be temporary: connecting again may help.
class Passing : public StoreLost {
 public:
  using StoreLost::StoreLost;
};

void send_all(const Socket& socket, std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const auto sent = ::send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      if (!wait_for(socket, POLLOUT, deadline)) throw Passing("it does not answer");
    } else if (errno != EINTR) {
      throw Passing(std::strerror(errno));
    }
  }
}

/// Appends at least one byte and at most `most`.
void receive(const Socket& socket, std::string& bytes, size_t most, Clock::time_point deadline) {
  char buffer[1 << 16];
  for (;;) {
    if (!wait_for(socket, POLLIN, deadline)) throw Passing("it does not answer");
    const auto size = ::recv(socket.fd(), buffer, std::min(most, sizeof buffer), 0);
    if (size > 0) {
      bytes.append(buffer, static_cast<size_t>(size));
      return;
    }
    if (size == 0) throw Passing("it closes the connection");
    if (errno != EAGAIN && errno != EINTR) throw Passing(std::strerror(errno));
  }
}

/// The next `size` bytes, which end with their checksum. StoreLost at the first byte that cannot
/// belong to such a message.
std::string receive_sealed(const Socket& socket, size_t size, bool (*begins)(std::string_view),
                           Clock::time_point deadline) {
  std::string bytes;
  while (bytes.size() < size) {
    receive(socket, bytes, size - bytes.size(), deadline);
    if (!begins(bytes)) throw StoreLost("the service there uses another protocol");
  }
  if (!is_sealed(bytes)) throw Passing("its answer was damaged on the way");
  return bytes;
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

[[noreturn]] void refuse_secret(const StorePlace& place, const Challenge& challenge) {
  const auto& noun = place.caller.noun;
  const auto difference =
      place.secret.empty()    ? fmt::format("{0} 0 has a secret and this {0} none", noun)
      : !challenge.has_secret ? fmt::format("this {0} has a secret and {0} 0 none", noun)
                              : fmt::format("{0} 0 has another secret", noun);
  throw UsageError(fmt::format(
      "{}: {} {} on host {}: the store at MASTER_ADDR:MASTER_PORT = {}:{} did not prove the "
      "secret of this {}: {}, or another job answers there; set the same TESSERA_SECRET or "
      "TESSERA_SECRET_FILE on every {}",
      place.caller.component, noun, place.rank, host_name(), place.address, place.port, noun,
      difference, noun));
}

void check_world(const StorePlace& place, const Challenge& challenge) {
  if (challenge.attempt < place.attempt)
    throw Passing(fmt::format("it belongs to attempt {}, and this rank to attempt {}",
                              challenge.attempt, place.attempt));
  if (challenge.attempt > place.attempt)
    throw UsageError(fmt::format(
        "init_process_group: rank {} on host {}: TORCHELASTIC_RESTART_COUNT is {} here and {} on "
        "rank 0, whose store answers at MASTER_ADDR:MASTER_PORT = {}:{}; expected the same on "
        "every rank",
        place.rank, host_name(), place.attempt, challenge.attempt, place.address, place.port));
  if (challenge.attempt == place.attempt && challenge.world < place.world)
    throw Passing(
        fmt::format("rank 0 has not left its world number {}, and this rank makes its number {}",
                    challenge.world + 1, place.world + 1));
  if (challenge.world > place.world)
    throw UsageError(fmt::format(
        "init_process_group: rank {} on host {} makes its world number {}, and rank 0 its number "
        "{}; expected as many successful calls before this one on every rank",
        place.rank, host_name(), place.world + 1, challenge.world + 1));
}

void shake_hands(const Socket& socket, const StorePlace& place, Clock::time_point deadline) {
  const bool has_secret = !place.secret.empty();
  const auto hello = make_hello({place.rank, place.attempt, has_secret, place.world});
  send_all(socket, hello, deadline);
  const auto challenge = receive_sealed(socket, kChallengeBytes, begins_challenge, deadline);
  const auto content = read_challenge(challenge).value();
  if (content.has_secret != has_secret) {
    send_all(socket, make_no_proof(), deadline);
    refuse_secret(place, content);
  }
  send_all(socket, make_proof(place.secret, hello, challenge), deadline);
  const auto any = [](std::string_view) { return true; };
  const auto verdict = receive_sealed(socket, kVerdictBytes, any, deadline);
  if (!store_proves(place.secret, hello, challenge, verdict)) refuse_secret(place, content);
  check_world(place, content);
  if (verdict[0] != kWelcome) throw Passing("it refuses this rank");
}

Socket connect_once(const StorePlace& place, Clock::time_point deadline) {
  std::exception_ptr problem;
  for (const auto& address : resolve_master_address(place.address, place.rank, place.caller)) {
    try {
      auto socket =
          connect_to(address, place.port, std::min(deadline, Clock::now() + kConnectLimit));
      shake_hands(socket, place, std::min(deadline, Clock::now() + kHandshakeLimit));
      return socket;
    } catch (const Passing&) {
      problem = std::current_exception();
    } catch (const std::system_error&) {
      problem = std::current_exception();
    }
  }
  if (!problem) throw StoreLost("MASTER_ADDR has no address");
  std::rethrow_exception(problem);
}

void pause_before_next_try(Clock::time_point deadline) {
  thread_local std::minstd_rand random{std::random_device{}()};
  const std::chrono::milliseconds pause{20 + random() % 80};
  std::this_thread::sleep_until(std::min(deadline, Clock::now() + pause));
}

}  // namespace

StoreLink::StoreLink(const StorePlace& place, Clock::time_point deadline, bool must_listen) {
  // The deadline ends the last try early, so the reason of the try before says more.
  for (std::string reason;; pause_before_next_try(deadline)) {
    std::string now;
    try {
      socket_ = connect_once(place, deadline);
      return;
    } catch (const Passing& error) {
      now = error.what();
    } catch (const std::system_error& error) {
      now = error.code().message();
      if (must_listen && error.code() == std::errc::connection_refused) throw StoreClosed(now);
    }
    const bool over = Clock::now() >= deadline;
    if (!over || reason.empty()) reason = now;
    if (over) throw StoreLost(reason);
  }
}

StoreMessage StoreLink::call(const StoreMessage& request, Clock::time_point deadline) {
  send_all(socket_, encode(request), deadline);
  std::string bytes;
  for (StoreMessage reply;;) {
    receive(socket_, bytes, kMaxMessageBytes, deadline);
    const auto taken = take_message(bytes, reply);
    if (taken == Taken::whole) return reply;
    if (taken == Taken::malformed)
      throw StoreLost("its reply is malformed, or was damaged on the way");
  }
}

}  // namespace tessera::comm
