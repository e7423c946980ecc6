#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/device_backend.h"
#include "tessera/process_group.h"

namespace tessera::on_device {

/// Makes the rank's groups; each call is collective and makes another one. Their time-out is 20
/// seconds unless another one than the default is asked for.
class Groups {
 public:
  Groups(int rank, int world, std::string folder) : rank_(rank), world_(world), folder_(folder) {}
  int rank() const { return rank_; }
  int size() const { return world_; }
  /// For CPU tensors, and for tensors on the device that is current: with the sums of CPU tensors
  /// where the device has the CPU's kernels, otherwise, as in native(), with those of the backend.
  ProcessGroup cpu(ProcessGroupOptions options = {});
  ProcessGroup device(ProcessGroupOptions options = {});
  ProcessGroup native(ProcessGroupOptions options = {});
  /// The same without a backend for the device.
  ProcessGroup staged(ProcessGroupOptions options = {});
  /// With this backend for the device.
  ProcessGroup with(std::shared_ptr<const comm::DeviceBackend> backend,
                    ProcessGroupOptions options = {}) {
    return make(std::move(backend), options);
  }

 private:
  ProcessGroup make(std::shared_ptr<const comm::DeviceBackend> backend,
                    ProcessGroupOptions options);

  int rank_, world_;
  std::string folder_;
  int made_ = 0;
};

/// Runs `body` on `world` processes, each with the accelerator of this test program, and with its
/// own delays where that is simulated. Returns for each rank the text of its error: "" if it had
/// none. A rank that runs longer than seconds_of_a_rank() ends. This process must not have used the
/// device.
std::vector<std::string> run_processes(int world, uint64_t seed,
                                       const std::function<void(Groups&)>& body);

/// Throws with this text unless `condition`.
void expect(bool condition, const std::string& text);

}  // namespace tessera::on_device
