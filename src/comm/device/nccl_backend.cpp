#include "comm/device/nccl_backend.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/error.h"

namespace tessera::comm {

std::shared_ptr<const DeviceBackend> nccl_backend(const World& world) {
  if (!at::globalContext().hasCUDA()) {
    throw UsageError(fmt::format(
        "ProcessGroup: backend NCCL: rank {} of {} sees no CUDA device; expected one for "
        "each rank, or backend Gloo",
        world.rank, world.size));
  }
  const auto connect = [](const World& place) -> c10::intrusive_ptr<compat::C10dBackend> {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = place.options.timeout;
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(place.store, place.rank, place.size,
                                                       options);
  };
  return std::make_shared<const DeviceBackend>(DeviceBackend{at::kCUDA, "nccl", connect});
}

}  // namespace tessera::comm
