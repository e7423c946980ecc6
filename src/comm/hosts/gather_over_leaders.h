#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>

#include "comm/hosts/host_map.h"
#include "comm/p2p/messenger.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {

/// Small gathers on several hosts: the first ranks of the hosts exchange the values of their hosts
/// in ceil(log2 H) messages. Each one gives the result to the ranks of its host. The other ranks
/// send no message.
class GatherOverLeaders {
 public:
  /// The arguments must outlive this object. `local`: null if every host has one rank.
  GatherOverLeaders(ShmTransport* local, Messenger& messenger, const HostMap& map, int rank)
      : local_(local), messenger_(messenger), map_(map), host_(map.host_of(rank)), rank_(rank) {}

  /// `table`: 1-D, host after host and within a host rank after rank; `counts`: the elements of
  /// each rank. On the first rank of each host its host's part is filled in. All ranks of the group
  /// call it, after Messenger::begin().
  void gather_table(const at::Tensor& table, const std::vector<int64_t>& counts);
  /// As Transport::all_gather().
  void gather(const at::Tensor& flat, const std::vector<int64_t>& counts);

 private:
  std::vector<int64_t> count_by_host(const std::vector<int64_t>& counts) const;

  ShmTransport* local_;
  Messenger& messenger_;
  const HostMap& map_;
  int host_, rank_;
};

}  // namespace tessera::comm
