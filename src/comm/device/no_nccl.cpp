#include "comm/device/nccl_backend.h"
#include "tessera/error.h"

namespace tessera::comm {

const bool kHasNccl = false;

std::shared_ptr<const DeviceBackend> nccl_backend(const World&) {
  throw UsageError(
      "ProcessGroup: backend NCCL: this build has no NCCL; configure with -DTESSERA_WITH_NCCL=ON "
      "and a libtorch with CUDA");
}

}  // namespace tessera::comm
