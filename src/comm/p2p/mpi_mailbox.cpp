#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupMPI.hpp>

#include "comm/p2p/c10d_mailbox.h"
#include "tessera/error.h"

namespace tessera::comm {

std::unique_ptr<Mailbox> make_mpi_mailbox(const World& world) {
  auto backend = c10d::ProcessGroupMPI::createProcessGroupMPI(world.world_ranks);
  if (!backend || backend->getSize() != world.size || backend->getRank() != world.rank) {
    throw UsageError(
        fmt::format("ProcessGroup: backend MPI: rank {} of {} has another rank or world size in "
                    "MPI; start the program with mpirun",
                    world.rank, world.size));
  }
  return make_c10d_mailbox("mpi", std::move(backend));
}

}  // namespace tessera::comm
