#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupMPI.hpp>

#include "comm/base/backends.h"
#include "comm/p2p/c10d_mailbox.h"
#include "tessera/error.h"

namespace tessera::comm {

std::unique_ptr<Transport> make_mpi_transport(const World& world) {
  auto backend = c10d::ProcessGroupMPI::createProcessGroupMPI(world.world_ranks);
  if (!backend || backend->getSize() != world.size || backend->getRank() != world.rank) {
    throw UsageError(
        fmt::format("ProcessGroup: backend MPI: rank {} of {} is not that rank for MPI; start the "
                    "program with mpirun",
                    world.rank, world.size));
  }
  return make_p2p_transport(world, make_c10d_mailbox("mpi", std::move(backend)));
}

}  // namespace tessera::comm
