#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "tessera/process_group.h"
#include "tessera/wire.h"

namespace tessera::comm {

struct DeviceBackend;

/// What a transport needs to connect one rank with the other members of a group.
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
  /// Rank 0 of the start-up group serves the store, which ends with it.
  bool rank_0_serves_store = false;
  /// Whether the store has not answered a rank that gave up; of this process, for all its groups.
  std::shared_ptr<std::atomic<bool>> store_is_silent = std::make_shared<std::atomic<bool>>(false);
  ProcessGroupOptions options;
  /// Moves tensors of an accelerator, beside a transport for CPU tensors. Null: CPU tensors only.
  std::shared_ptr<const DeviceBackend> device;
  /// How values travel between hosts; see ProcessGroup::with_wire().
  WireFormat wire = WireFormat::float32;

  /// Rank `rank` of a start-up group with the members 0 … size-1. The caller sets hosts, same_host,
  /// address and store.
  static World start(int rank, int size, const ProcessGroupOptions& options);

  /// The members with these numbers, as ranks of the start-up group.
  std::vector<int> in_world(const std::vector<int>& members) const;
};

/// True if all these host numbers are equal.
bool all_equal(const std::vector<int>& hosts);

/// "rank 2", "ranks 1 and 3".
std::string rank_list(const std::vector<int>& ranks);

}  // namespace tessera::comm
