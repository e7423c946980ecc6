#include "comm/device/nccl_backend.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <utility>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// libtorch's watchdog ends the process where a collective fails or is late, after four times the
/// time of a dump (15 s). Here it only ends the collective, soon, and the group says which rank is
/// lost.
void keep_process_alive() {
  for (const auto& [variable, value] : {std::pair{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"},
                                        {"TORCH_NCCL_ENABLE_MONITORING", "0"},
                                        {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},
                                        {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "50"}})
    ::setenv(variable, value, 0);
}

/// "" where NCCL itself is told that the ranks of this host are on several.
std::string identity(at::Device device) {
  if (std::getenv("NCCL_HOSTID")) return "";
  std::array<char, 32> id{};
  const auto error = cudaDeviceGetPCIBusId(id.data(), id.size(), device.index());
  return error == cudaSuccess ? id.data() : "";
}

/// The group looks for lost ranks for its time-out and a beat, and names them. A collective that is
/// late without one ends afterwards.
constexpr std::chrono::milliseconds kAfterLiveness{1500};

}  // namespace

const bool kHasNccl = true;

std::shared_ptr<const DeviceBackend> nccl_backend(const World& world) {
  if (!at::globalContext().hasCUDA()) {
    throw UsageError(fmt::format(
        "ProcessGroup: backend NCCL: rank {} of {} sees no CUDA device; expected one for "
        "each rank, or backend Gloo",
        world.rank, world.size));
  }
  const auto connect = [](const World& place) -> c10::intrusive_ptr<compat::C10dBackend> {
    keep_process_alive();
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = place.options.timeout + kAfterLiveness;
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(place.store, place.rank, place.size,
                                                       options);
  };
  // Before PyTorch 2.6 its base class has no abort().
  const auto abort = [](compat::C10dBackend& backend) {
    compat::abort(static_cast<c10d::ProcessGroupNCCL&>(backend));
  };
  return std::make_shared<const DeviceBackend>(
      DeviceBackend{at::kCUDA, "nccl", connect, abort, identity});
}

}  // namespace tessera::comm
