#include "comm/nccl/nccl_transport.h"
#include "tessera/error.h"

namespace tessera::comm {

std::unique_ptr<Transport> make_nccl_transport(const World&) {
  throw UsageError(
      "ProcessGroup: backend NCCL: this build has no NCCL; configure with -DTESSERA_WITH_NCCL=ON "
      "and a libtorch with CUDA");
}

}  // namespace tessera::comm
