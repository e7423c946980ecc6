#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace tessera::cuda {

/// What this process has asked of CUDA's runtime, on any thread. NCCL's own calls are not counted:
/// it has a runtime of its own.
struct RuntimeCalls {
  uint64_t launches = 0;  ///< Of kernels.
  uint64_t waits = 0;     ///< For a stream, an event, a device or a copy.
  std::multiset<std::string> waiting_functions;
};
RuntimeCalls runtime_calls();
void reset_runtime_calls();

}  // namespace tessera::cuda
