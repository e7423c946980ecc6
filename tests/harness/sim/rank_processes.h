#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/process_group.h"

namespace tessera::sim {

/// Makes the rank's groups; each call is collective and makes another one.
class Groups {
 public:
  Groups(int rank, int world, std::string folder) : rank_(rank), world_(world), folder_(folder) {}
  int rank() const { return rank_; }
  /// For CPU tensors, and for tensors on the device that is current.
  ProcessGroup cpu(ProcessGroupOptions options = {});
  ProcessGroup device(ProcessGroupOptions options = {});
  /// The same without a backend for the device.
  ProcessGroup staged(ProcessGroupOptions options = {});

 private:
  ProcessGroup make(bool with_backend, ProcessGroupOptions options);

  int rank_, world_;
  std::string folder_;
  int made_ = 0;
};

/// Runs `body` on `world` processes, each with the simulated device and its own delays. Returns for
/// each rank the text of its error: "" if it had none. A rank that runs longer than a minute ends.
/// This process must not have used the device.
std::vector<std::string> run_processes(int world, uint64_t seed,
                                       const std::function<void(Groups&)>& body);

/// Throws with this text unless `condition`.
void expect(bool condition, const std::string& text);

}  // namespace tessera::sim
