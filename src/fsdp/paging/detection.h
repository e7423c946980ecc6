#pragma once

#include <string_view>

#include "fsdp/paging/page.h"

// [Note: detection of parameter use] C++ modules have no forward hooks, but every operator that
// uses a parameter passes through the dispatcher. Sharded parameters carry a spare dispatch key, so
// the operators on them, and only these, first reach a fallback that notifies the owners of the
// pages. Views and detached aliases inherit the key; results do not. Behind the fallback the key is
// excluded, because the parts of an operator work on the same tensors. Only one fallback for a key
// can be registered in a process; if another library has one, construction is an error. On request
// (ParameterDetection::record_function) a global RecordFunction callback inspects the inputs of
// every operator instead. It cannot throw, so it does not refuse wrong uses.

namespace tessera::fsdp {

/// While alive, operators of this thread on pages are not detected. For Tessera's own operators.
class NoDetection {
 public:
  NoDetection() : guard_(kDetectionKey) {}
  NoDetection(const NoDetection&) = delete;

  static bool active() { return c10::impl::tls_is_dispatch_key_excluded(kDetectionKey); }

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

/// Calls PageOwner::need() of the owners of `uses` (at least one) before operator `op` runs.
void notify_owners(c10::ArrayRef<PageUse> uses, std::string_view op);

/// Registers kernels with native signatures for the operators that most models consist of. The
/// boxing of the fallback would cost more than the rest of the detection. Call it once.
void register_frequent_operators();

/// Starts the detection and returns the mechanism in use. UsageError if `wanted` is dispatch_key
/// and another library has taken the key.
ParameterDetection start_detection(ParameterDetection wanted);
/// Ends the detection that one start_detection() has started.
void stop_detection(ParameterDetection mechanism);

}  // namespace tessera::fsdp
