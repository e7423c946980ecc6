#include "comm/store/addresses.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include "comm/store/socket.h"
#include "tessera/detail/classic.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using AddressesFound = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

std::string numeric_text(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = {};
  return ::getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text
                                                                                          : "";
}

using Interfaces = std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)>;

Interfaces interfaces() {
  ifaddrs* found = nullptr;
  return {::getifaddrs(&found) == 0 ? found : nullptr, ::freeifaddrs};
}

/// Empty if the entry has no address of this family.
std::string address_of_entry(const ifaddrs& entry, int family) {
  if (!entry.ifa_addr || entry.ifa_addr->sa_family != family) return "";
  return numeric_text(entry.ifa_addr,
                      family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
}

/// The bytes of an address or a netmask.
template <class Address>
unsigned char* bytes_of_address(Address& address) {
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  return any->sa_family == AF_INET
             ? reinterpret_cast<unsigned char*>(&reinterpret_cast<sockaddr_in*>(any)->sin_addr)
             : reinterpret_cast<unsigned char*>(&reinterpret_cast<sockaddr_in6*>(any)->sin6_addr);
}

/// "192.0.2.0/24", of an entry that has an address of this family.
std::string network_of_entry(const ifaddrs& entry, int family) {
  const bool old = family == AF_INET;
  const size_t size = old ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  sockaddr_storage address{}, mask{};
  std::memcpy(&address, entry.ifa_addr, size);
  if (entry.ifa_netmask) std::memcpy(&mask, entry.ifa_netmask, size);
  mask.ss_family = address.ss_family;
  auto* const bytes = bytes_of_address(address);
  const auto* const bits = bytes_of_address(mask);
  int prefix = 0;
  for (size_t i = 0; i < (old ? 4 : 16); ++i) {
    bytes[i] &= bits[i];
    prefix += std::popcount(bits[i]);
  }
  return fmt::format("{}/{}", numeric_text(reinterpret_cast<sockaddr*>(&address), size), prefix);
}

/// A positive number of the system about an interface; 0: unknown.
int64_t number_of_interface(const std::string& name, const char* what) {
  detail::Classic<std::ifstream> file("/sys/class/net/" + name + "/" + what);
  int64_t number = 0;
  return file >> number && number > 0 ? number : 0;
}

/// The flag changes up to a second after the cable does.
bool has_cable(const ifaddrs& entry) {
  if (!(entry.ifa_flags & IFF_UP) || (entry.ifa_flags & IFF_LOOPBACK)) return false;
  return (entry.ifa_flags & IFF_RUNNING) || number_of_interface(entry.ifa_name, "carrier") == 1;
}

}  // namespace

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

std::string address_towards(const std::string& peer) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (peer.empty() || ::getaddrinfo(peer.c_str(), "9", &hints, &found) != 0) return "";
  const AddressesFound list(found, ::freeaddrinfo);
  for (const auto* entry = found; entry; entry = entry->ai_next) {
    const Socket socket(::socket(entry->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket.fd() < 0) continue;
    sockaddr_storage own{};
    socklen_t size = sizeof own;
    auto* const any = reinterpret_cast<sockaddr*>(&own);
    if (::connect(socket.fd(), entry->ai_addr, entry->ai_addrlen) != 0 ||
        ::getsockname(socket.fd(), any, &size) != 0)
      continue;
    if (auto text = numeric_text(any, size); !text.empty()) return text;
  }
  return "";
}

std::string address_of_interface(const std::string& names, int rank) {
  const auto list = interfaces();
  std::istringstream remaining(names);
  for (std::string name; std::getline(remaining, name, ',');) {
    for (const int family : {AF_INET, AF_INET6}) {
      for (const auto* entry = list.get(); entry; entry = entry->ifa_next) {
        if (name != entry->ifa_name) continue;
        if (auto text = address_of_entry(*entry, family); !text.empty()) return text;
      }
    }
  }
  throw UsageError(
      fmt::format("ProcessGroup: rank {}: GLOO_SOCKET_IFNAME is '{}'; expected the "
                  "name of an interface of this host with an address",
                  rank, names));
}

std::vector<std::string> resolve_master_address(const std::string& name, int rank,
                                                const Caller& caller) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  int error = EAI_AGAIN;
  constexpr int kTries = 5;
  for (int i = 0; i < kTries && error == EAI_AGAIN; ++i) {
    if (i > 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    error = ::getaddrinfo(name.c_str(), nullptr, &hints, &found);
  }
  if (error)
    throw UsageError(
        fmt::format("{}: {} {}: MASTER_ADDR is '{}': {}; expected a name or an address of the "
                    "host of {} 0",
                    caller.component, caller.noun, rank, name, ::gai_strerror(error), caller.noun));
  const AddressesFound list(found, ::freeaddrinfo);
  std::vector<std::string> addresses;
  for (const auto* entry = found; entry; entry = entry->ai_next) {
    auto text = numeric_text(entry->ai_addr, entry->ai_addrlen);
    if (!text.empty() && std::find(addresses.begin(), addresses.end(), text) == addresses.end())
      addresses.push_back(std::move(text));
  }
  return addresses;
}

std::vector<std::string> listening_addresses(std::vector<std::string> resolved,
                                             const std::string& outward) {
  if (std::all_of(resolved.begin(), resolved.end(), is_loopback) && !outward.empty())
    resolved.push_back(outward);
  return resolved;
}

std::string outward_address() {
  // Addresses for documentation: no host has them, so their route is the default route.
  for (const char* const nowhere : {"198.51.100.1", "2001:db8::1"})
    if (auto address = address_towards(nowhere); !address.empty() && !is_loopback(address))
      return address;
  return "";
}

std::vector<NetworkInterface> network_interfaces() {
  std::vector<NetworkInterface> found;
  std::set<std::string> have_old;
  const auto list = interfaces();
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* entry = list.get(); entry; entry = entry->ifa_next) {
      if (!has_cable(*entry)) continue;
      auto address = address_of_entry(*entry, family);
      const bool of_link = address.starts_with("fe80:") || address.starts_with("169.254.");
      if (address.empty() || of_link) continue;
      if (family == AF_INET) have_old.insert(entry->ifa_name);
      else if (have_old.contains(entry->ifa_name)) continue;
      found.push_back({entry->ifa_name, std::move(address), network_of_entry(*entry, family),
                       number_of_interface(entry->ifa_name, "speed")});
    }
  }
  return found;
}

std::string usual_address() {
  if (auto address = outward_address(); !address.empty()) return address;
  const auto list = interfaces();
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* entry = list.get(); entry; entry = entry->ifa_next) {
      if (!(entry->ifa_flags & IFF_UP) || (entry->ifa_flags & IFF_LOOPBACK)) continue;
      if (auto text = address_of_entry(*entry, family); !text.empty()) return text;
    }
  }
  return "";
}

}  // namespace tessera::comm
