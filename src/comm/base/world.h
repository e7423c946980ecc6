#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/detail/communicator.h"
#include "tessera/process_group.h"
#include "tessera/wire.h"

namespace tessera::comm {

class ProcessFailures;
class ShmArena;
struct DeviceBackend;

/// The values that a transport needs to connect one rank with the other members of a group.
struct World {
  int rank = 0;
  int size = 1;
  std::vector<int> world_ranks;  ///< The members' ranks in the start-up group.
  bool same_host = true;         ///< All members are on this host: only loopback is used.
  /// One number for each member; members with equal numbers share a host. Empty if the hosts are
  /// unknown or all members are on one.
  std::vector<int> hosts;
  std::string address;  ///< This host's address for the other hosts; empty if unknown.
  /// Shared by the members. Its keys are already prefixed for this group.
  c10::intrusive_ptr<c10d::Store> store;
  /// What all groups of a process have from the one that they began with.
  struct StartGroup {
    int size = 1;
    /// The program's own messages, if the group was made of them and they carry its data; or null.
    std::shared_ptr<detail::Communicator> communicator = nullptr;
    /// Its store, for keys that all groups share. Null: `World::store` is that.
    c10::intrusive_ptr<c10d::Store> store = {};
    bool rank_0_serves = false;  ///< Its rank 0 serves the store, which ends with it.
  };
  StartGroup start_group;
  /// Shared by the groups of this process. Null: groups do not learn of failures of others.
  std::shared_ptr<ProcessFailures> failures;
  /// Memory that the members of a host share. Null: make_transport() makes it. Groups of the same
  /// members share it, so that each reads memory that another has allocated.
  std::shared_ptr<ShmArena> arena;
  ProcessGroupOptions options;
  /// Moves tensors of an accelerator, beside a transport for CPU tensors. Null: CPU tensors only.
  std::shared_ptr<const DeviceBackend> device;
  /// The reason for staging an accelerator's tensors unasked; "": the caller asked for it.
  std::string staged_because;
  /// The format of values between hosts; see ProcessGroup::with_wire().
  WireFormat wire = WireFormat::float32;

  /// Rank `rank` of a start-up group with the members 0 … size-1. The caller sets hosts, same_host,
  /// address and store.
  static World start(int rank, int size, const ProcessGroupOptions& options);

  /// The members with these numbers, as ranks of the start-up group.
  std::vector<int> in_world(const std::vector<int>& members) const;
};

/// The store of the start-up group.
const c10::intrusive_ptr<c10d::Store>& store_of_start(const World& world);

/// True if all these host numbers are equal.
bool all_equal(const std::vector<int>& hosts);

/// "rank 2", "ranks 1 and 3".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace tessera::comm
