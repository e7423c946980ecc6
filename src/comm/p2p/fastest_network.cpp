#include "comm/p2p/fastest_network.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/base/roll_call.h"
#include "comm/p2p/mailbox.h"
#include "tessera/detail/classic.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kNone = "none";
constexpr std::chrono::seconds kLongestTrial{3};
constexpr int64_t kTrialBytes = 4 << 20, kFirstBytes = 1 << 20;

/// The data that the first rank of each host sends about its host.
struct Host {
  int rank = 0;
  std::string usual;  ///< The address on the route to rank 0.
  std::map<std::string, NetworkInterface> networks;
};

BrokenWorldError missing(const World& world, const std::vector<int>& ranks) {
  return BrokenWorldError(
      fmt::format("init_process_group: rank {} of {}: {} did not arrive within {} ms", world.rank,
                  world.size, rank_list(ranks), world.options.timeout.count()),
      ranks);
}

std::vector<std::string> values_of_all(const World& world, const std::string& name,
                                       const std::string& value) {
  try {
    std::vector<std::string> values(world.size);
    for (auto& [rank, presence] : roll_call(world.store, name, world.rank, world.size, value,
                                            Clock::now() + world.options.timeout))
      values[rank] = std::move(presence.value);
    return values;
  } catch (const RanksMissing& error) {
    throw missing(world, error.ranks);
  }
}

/// The number of the host that has this first rank.
size_t number_of(const std::vector<Host>& hosts, int first) {
  size_t number = 0;
  while (hosts[number].rank != first) ++number;
  return number;
}

std::string text_of(const World& world, const std::vector<NetworkInterface>& own) {
  std::string text = world.address.empty() ? kNone : world.address;
  if (world.start_group.communicator) text += fmt::format(" {0} {0} {0} 0", kMpi);
  for (const auto& each : own)
    text += fmt::format(" {} {} {} {}", each.name, each.address, each.network, each.speed);
  return text;
}

std::vector<Host> hosts_of(const World& world, const std::vector<std::string>& texts) {
  std::vector<Host> hosts;
  for (int rank = 0; rank < world.size; ++rank) {
    if (world.hosts[rank] != rank) continue;
    detail::Classic<std::istringstream> text(texts[rank]);
    Host host;
    host.rank = rank;
    text >> host.usual;
    for (NetworkInterface one; text >> one.name >> one.address >> one.network >> one.speed;) {
      auto& kept = host.networks.try_emplace(one.network, one).first->second;
      if (one.address == host.usual) kept = one;
    }
    hosts.push_back(std::move(host));
  }
  return hosts;
}

/// The route to rank 0, then the other networks of which each host has an address. None if the
/// routes are unknown.
std::vector<Network> networks_of(const std::vector<Host>& hosts) {
  std::vector<Network> networks(1);
  networks[0].name = "the route to rank 0";
  for (const auto& host : hosts) {
    if (host.usual == kNone) return {};
    networks[0].addresses.push_back(host.usual);
  }
  for (const auto& [name, first] : hosts[0].networks) {
    Network network{name, 0, first.speed, name == kMpi ? "" : first.name, {}};
    for (const auto& host : hosts) {
      const auto found = host.networks.find(name);
      if (found == host.networks.end()) break;
      network.speed = std::min(network.speed, found->second.speed);
      network.addresses.push_back(found->second.address);
    }
    if (network.addresses == networks[0].addresses) std::swap(networks[0], network);
    else if (network.addresses.size() == hosts.size()) networks.push_back(std::move(network));
  }
  return networks;
}

/// One message to each of these members and one from each, of as many bytes.
void exchange(Mailbox& mailbox, const std::vector<int>& to, const std::vector<int>& from,
              int64_t bytes, Clock::time_point deadline) {
  const auto data = at::zeros({bytes}, at::kChar);
  std::vector<at::Tensor> arrived;
  std::vector<std::unique_ptr<Message>> messages;
  for (const int peer : from) {
    arrived.push_back(at::empty({bytes}, at::kChar));
    messages.push_back(mailbox.receive(arrived.back(), peer, 0));
  }
  for (const int peer : to) messages.push_back(mailbox.send(data, peer, 0));
  for (const auto& message : messages) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    message->wait(std::max(left, std::chrono::milliseconds(1)));
  }
}

/// Bytes a second to the next host; 0 if a host is not reached in time. The first ranks of all
/// hosts call it.
double try_network(const World& world, const std::vector<Host>& hosts, const Network& network,
                   size_t number) {
  const int size = static_cast<int>(hosts.size());
  const int host = static_cast<int>(number_of(hosts, world.rank));
  const bool over_mpi = network.name == kMpi;
  auto members = World::start(host, size, world.options);
  members.same_host = false;
  members.address = network.addresses[host];
  members.store =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("network{}/", number), world.store);
  members.start_group = world.start_group;
  members.world_ranks.clear();
  for (const auto& each : hosts) members.world_ranks.push_back(each.rank);
  std::unique_ptr<Mailbox> mailbox;
  try {
    mailbox = over_mpi ? make_communicator_mailbox(members) : make_tcp_mailbox(members);
  } catch (const BrokenWorldError& error) {  // counts hosts
    std::vector<int> ranks;
    for (const int other : error.ranks()) ranks.push_back(hosts[other].rank);
    throw missing(world, ranks);
  }
  const auto deadline = Clock::now() + kLongestTrial;
  std::vector<int> others;
  for (int other = 0; other < size; ++other)
    if (other != host) others.push_back(other);
  const std::vector<int> next{(host + 1) % size}, previous{(host + size - 1) % size};
  double rate = 0;
  try {
    exchange(*mailbox, others, others, 1, deadline);
    exchange(*mailbox, next, previous, kFirstBytes, deadline);
    const auto start = Clock::now();
    exchange(*mailbox, next, previous, kTrialBytes, deadline);
    exchange(*mailbox, previous, next, 1, deadline);  // all has arrived
    rate = kTrialBytes / std::chrono::duration<double>(Clock::now() - start).count();
  } catch (const std::runtime_error&) {  // a host is not reached
  }
  return rate;
}

void log_choice(const std::vector<Network>& networks, size_t chosen) {
  std::string text;
  for (size_t i = 0; i < networks.size(); ++i) {
    const auto& network = networks[i];
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", network.name,
                        network.interface.empty() ? "" : " (" + network.interface + ")");
    text += network.rate > 0 ? fmt::format(": {:.2f} Gbit/s", network.rate * 8e-9)
                             : std::string(": does not reach all hosts");
  }
  const auto& best = networks[chosen];
  spdlog::info("tessera: messages between hosts use {}{}; measured {}",
               best.interface.empty() ? "" : best.interface + ", ", best.name, text);
}

}  // namespace

size_t fastest_of(const std::vector<Network>& networks) {
  size_t best = 0;
  for (size_t i = 1; i < networks.size(); ++i) {
    const auto &one = networks[i], &so_far = networks[best];
    const double faster = one.name == kMpi ? 2 : 1.25;
    const bool as_fast = one.rate * faster > so_far.rate;
    if (one.rate > so_far.rate * faster ||
        (as_fast && one.rate > 0 && so_far.speed > 0 && one.speed > so_far.speed))
      best = i;
  }
  return best;
}

Route fastest_route(const World& world, const std::vector<NetworkInterface>& own) {
  const bool is_first = world.hosts[world.rank] == world.rank;
  const auto hosts =
      hosts_of(world, values_of_all(world, "networks", is_first ? text_of(world, own) : ""));
  auto networks = networks_of(hosts);
  if (networks.size() < 2) return {world.address};
  std::string rates;
  for (size_t i = 0; is_first && i < networks.size(); ++i)
    rates += fmt::format("{:.0f} ", try_network(world, hosts, networks[i], i));
  const auto all = values_of_all(world, "rates", rates);
  for (const auto& host : hosts) {
    detail::Classic<std::istringstream> text(all[host.rank]);
    for (auto& network : networks) {
      double rate = 0;
      text >> rate;
      network.rate = host.rank == 0 ? rate : std::min(network.rate, rate);
    }
  }
  const size_t chosen = fastest_of(networks);
  if (world.rank == 0) log_choice(networks, chosen);
  if (networks[chosen].name == kMpi) return {world.address, true};
  return {networks[chosen].addresses[number_of(hosts, world.hosts[world.rank])]};
}

}  // namespace tessera::comm
