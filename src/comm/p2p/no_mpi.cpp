#include "comm/base/backends.h"
#include "tessera/error.h"

namespace tessera::comm {

std::unique_ptr<Transport> make_mpi_transport(const World&) {
  throw UsageError(
      "ProcessGroup: backend MPI: this build has no MPI; configure with -DTESSERA_WITH_MPI=ON and "
      "a libtorch built with MPI");
}

}  // namespace tessera::comm
