#include "comm/p2p/mailbox.h"
#include "tessera/error.h"

namespace tessera::comm {

std::unique_ptr<Mailbox> make_mpi_mailbox(const World&) {
  throw UsageError(
      "ProcessGroup: backend MPI: this build has no MPI; configure with -DTESSERA_WITH_MPI=ON and "
      "a libtorch built with MPI");
}

}  // namespace tessera::comm
