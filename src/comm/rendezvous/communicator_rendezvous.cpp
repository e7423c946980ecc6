#include "comm/rendezvous/communicator_rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <unistd.h>

#include "comm/base/world.h"
#include "comm/store/addresses.h"
#include "comm/store/secret.h"
#include "comm/store/socket.h"
#include "comm/store/store_server.h"
#include "comm/store/verified_store.h"
#include "tessera/detail/classic.h"
#include "tessera/error.h"
#include "tessera/version.h"

namespace tessera::comm {
namespace {

using Communicator = detail::Communicator;
using Store = c10::intrusive_ptr<c10d::Store>;

/// The values that the ranks exchange during start-up. A rank that cannot continue sends the
/// reason, so that no rank waits for it.
class Exchange {
 public:
  Exchange(Communicator& communicator, std::chrono::milliseconds limit)
      : rank(communicator.rank()),
        size(communicator.size()),
        communicator_(communicator),
        deadline_(std::chrono::steady_clock::now() + limit) {}

  /// The result of `say` on each rank. If it throws on a rank, UsageError on all.
  template <class Say>
  std::vector<std::string> operator()(const Say& say) {
    std::string mine;
    try {
      mine = std::string("+").append(say());
    } catch (const std::exception& error) {
      mine = std::string("-") + error.what();
    }
    auto texts = communicator_.all_gather(mine, deadline_);
    constexpr std::string_view kPrefix = "init_process_group: ";
    for (int r = 0; r < size; ++r) {
      if (texts[r][0] != '-') continue;
      std::string_view problem(texts[r]);
      problem.remove_prefix(1);
      if (problem.starts_with(kPrefix)) problem.remove_prefix(kPrefix.size());
      throw UsageError(fmt::format("{}rank {}: {}", kPrefix, r, problem));
    }
    for (auto& text : texts) text.erase(0, 1);
    return texts;
  }

  const int rank, size;

 private:
  Communicator& communicator_;
  const Communicator::Deadline deadline_;
};

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  detail::Classic<std::istringstream> stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// The values that must be equal on all ranks, one a line.
std::string described(const ProcessGroupOptions& options) {
  constexpr const char* kBackends[] = {"Auto", "SharedMemory", "Gloo", "NCCL", "MPI", "TCP"};
  return fmt::format(
      "version is {}\nbackend is {}\ntimeout is {} ms\ncheck_collectives is {}\n"
      "check_results is {}\nstaged_device is {}\ndeterministic is {}\n",
      TESSERA_VERSION, kBackends[static_cast<int>(options.backend)], options.timeout.count(),
      options.check_collectives, options.check_results,
      c10::DeviceTypeName(options.staged_device, true), options.deterministic);
}

/// Throws on every rank the same error, which names the first rank that differs from rank 0.
void check_equal(const std::vector<std::vector<std::string>>& cards, size_t lines) {
  for (size_t r = 1; r < cards.size(); ++r)
    for (size_t i = 0; i < lines; ++i)
      if (cards[r].at(i) != cards[0].at(i))
        throw UsageError(
            fmt::format("init_process_group: rank {}: {}, and on rank 0 {}; expected the same on "
                        "every rank",
                        r, cards[r][i], cards[0][i]));
}

/// A file without a name. It stays open as long as the store that uses it.
struct OpenFile {
  Socket file;
  std::string name() const { return fmt::format("/proc/self/fd/{}", file.fd()); }
};
class FileInMemory : private OpenFile, public c10d::FileStore {
 public:
  FileInMemory(Socket opened, int size)
      : OpenFile{std::move(opened)}, FileStore(OpenFile::name(), size) {}
};

/// A store in memory of rank 0 that the other ranks open through /proc. Null on all ranks if one of
/// them cannot open it, for example in another container.
Store store_in_memory(Exchange& exchange) {
  Socket file;
  const auto place = exchange([&] {
    if (exchange.rank != 0) return std::string();
    const auto token = random_token(16);
    file = Socket(::memfd_create(token.c_str(), MFD_CLOEXEC));
    return fmt::format("{} /proc/{}/fd/{}", token, ::getpid(), file.fd());
  })[0];
  const auto blank = place.find(' ');
  const auto name = "/memfd:" + place.substr(0, blank), path = place.substr(blank + 1);
  const auto opened = exchange([&] {
    if (exchange.rank != 0) file = Socket(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    // In another pid namespace this path is another file.
    char target[256] = {};
    const auto own = fmt::format("/proc/self/fd/{}", file.fd());
    const bool is_it = file.fd() >= 0 && ::readlink(own.c_str(), target, sizeof target - 1) > 0 &&
                       std::string(target).starts_with(name);
    return is_it ? "yes" : "no";
  });
  if (std::count(opened.begin(), opened.end(), "yes") != exchange.size) return {};
  return c10::make_intrusive<FileInMemory>(std::move(file), exchange.size);
}

/// A store that rank 0 serves at `address`.
Store served_store(Exchange& exchange, const std::string& address,
                   std::chrono::milliseconds timeout) {
  std::shared_ptr<StoreServer> server;
  const auto offer = exchange([&] {
    if (exchange.rank != 0) return std::string();
    auto listeners = listen_at({address}, 0);
    const int port = port_of(listeners.front());
    auto secret = random_token(32);
    StoreServer::Options options;
    options.gate.secret = secret;
    server = std::make_shared<StoreServer>(std::move(listeners), std::move(options));
    return fmt::format("{} {}", port, secret);
  })[0];
  StorePlace place;
  place.address = address;
  place.rank = exchange.rank;
  place.size = exchange.size;
  detail::Classic<std::istringstream>(offer) >> place.port >> place.secret;
  Store store;
  exchange([&] {
    try {
      // The others wait for this rank's value.
      store = c10::make_intrusive<VerifiedStore>(place, timeout * 3 / 4, std::move(server));
    } catch (const StoreLost& error) {
      throw UsageError(
          fmt::format("it cannot reach rank 0 at {}:{}: {}; expected an interface that reaches all "
                      "hosts, which "
                      "GLOO_SOCKET_IFNAME names",
                      place.address, place.port, error.what()));
    }
    return "";
  });
  return store;
}

/// The address of this rank if no other host must be reached.
std::string own_address(int rank) {
  const char* const interface = std::getenv("GLOO_SOCKET_IFNAME");
  return interface && *interface ? address_of_interface(interface, rank) : usual_address();
}

}  // namespace

StoreRendezvous rendezvous_over_communicator(Communicator& communicator,
                                             const ProcessGroupOptions& options) {
  const bool valid = options.timeout.count() > 0;
  Exchange exchange(communicator, valid ? options.timeout : ProcessGroupOptions().timeout);
  const auto texts = exchange([&] {
    check_timeout(options.timeout);
    return described(options) + network_identity() + "\n" + own_address(exchange.rank) + "\n" +
           communicator.refuses_threads();
  });
  std::vector<std::vector<std::string>> cards;
  for (const auto& text : texts) cards.push_back(lines_of(text + "\n"));
  const auto lines = lines_of(described(options)).size();
  check_equal(cards, lines);
  StoreRendezvous rendezvous;
  for (const auto& card : cards) {
    if (rendezvous.refusal.empty()) rendezvous.refusal = card[lines + 2];
    const auto same = [&](const auto& other) { return other[lines] == card[lines]; };
    rendezvous.hosts.push_back(
        static_cast<int>(std::find_if(cards.begin(), cards.end(), same) - cards.begin()));
  }
  const bool one_host = all_equal(rendezvous.hosts);
  if (one_host) rendezvous.store = store_in_memory(exchange);
  if (!rendezvous.store) {
    const auto first = one_host ? "127.0.0.1" : cards[0][lines + 1];
    rendezvous.store = served_store(exchange, first, options.timeout);
    const bool named = std::getenv("GLOO_SOCKET_IFNAME") != nullptr;
    if (!one_host)
      rendezvous.address = named ? cards[exchange.rank][lines + 1] : address_towards(first);
  }
  rendezvous.store->setTimeout(options.timeout);
  return rendezvous;
}

}  // namespace tessera::comm
