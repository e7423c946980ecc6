#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::comm {

/// The processes that meet at a store, for messages: the ranks of a world, or the launchers of its
/// hosts.
struct Caller {
  std::string component = "init_process_group";
  std::string noun = "rank";  ///< A number follows it.
};

/// True for a loopback address, or the name localhost. Pure.
bool is_loopback(const std::string& address);

/// The local address of the interface through which this host reaches `peer`; empty if there is no
/// route. Sends nothing, but may ask a name server.
std::string address_towards(const std::string& peer);

/// The numeric address of the first given interface ("eth0" or "eth0,eth1") that has one, IPv4
/// before IPv6. Throws UsageError, naming GLOO_SOCKET_IFNAME, if none has.
std::string address_of_interface(const std::string& names, int rank);

/// The numeric addresses of a host, each once. Throws UsageError, naming MASTER_ADDR and the rank,
/// if the name is unknown. Blocks while the name server does.
std::vector<std::string> resolve_master_address(const std::string& name, int rank,
                                                const Caller& caller = {});

/// The addresses on which rank 0 listens: those that MASTER_ADDR has on its host. If all of them
/// are loopback addresses, as with Debian's line "127.0.1.1 NAME" in /etc/hosts, other hosts see
/// another address under that name. `outward`, the address of the interface of the default route,
/// is then added; empty: there is none. Pure.
std::vector<std::string> listening_addresses(std::vector<std::string> resolved,
                                             const std::string& outward);

/// The address of the interface of this host's default route; empty if there is none.
std::string outward_address();

/// An address of an interface that is up, has a cable and is not the loopback one.
struct NetworkInterface {
  std::string name, address;
  std::string network;  ///< "192.0.2.0/24": equal on the hosts that share it.
  int64_t speed = 0;    ///< Mbit/s, as its driver says; 0: unknown.
};

/// The addresses of this host's interfaces, except those that are valid on one link alone. An
/// interface with IPv4 addresses is listed with these alone.
std::vector<NetworkInterface> network_interfaces();

/// outward_address(), else the address of the first interface that is up and is not the loopback
/// one; empty if there is none.
std::string usual_address();

}  // namespace tessera::comm
