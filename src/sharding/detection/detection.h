#pragma once

#include <string>
#include <string_view>

#include "sharding/detection/page.h"

// [Note: detection of parameter use] C++ modules have no forward hooks, but every operator that
// uses a parameter passes through the dispatcher. Sharded parameters, and gradients whose norms are
// watched, carry a spare dispatch key, so exactly the operators on these first reach a fallback,
// which notifies the owners of the pages. Views and detached aliases inherit the key; results do
// not. After the fallback the key is excluded, because the parts of an operator work on the same
// tensors. Only one fallback for a key can be registered in a process; if another library has one,
// nothing can be detected.

namespace tessera::sharding {

/// While alive, operators of this thread on pages are not detected. For Tessera's own operators.
class NoDetection {
 public:
  NoDetection() : guard_(kDetectionKey) {}
  NoDetection(const NoDetection&) = delete;

  static bool active() { return c10::impl::tls_is_dispatch_key_excluded(kDetectionKey); }

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

/// Runs `op`, an operator that takes `use` (page may be null), without detection. The owner of the
/// page may replace its error.
template <class Operator>
decltype(auto) run_undetected(const PageUse& use, std::string_view op, Operator&& run) {
  const NoDetection no_detection;
  try {
    return run();
  } catch (const c10::Error& error) {
    if (use.page && use.page->owner()) use.page->owner()->failed(use, op, error);
    throw;
  }
}

/// Calls PageOwner::need() of the owners of `uses` (at least one) before operator `op` runs.
void notify_owners(c10::ArrayRef<PageUse> uses, std::string_view op);

/// Registers kernels with native signatures for the operators that most models consist of. The
/// boxing of the fallback would cost more than the rest of the detection. Call it once.
void register_frequent_operators();

/// Starts the detection for the life of the process; later calls do nothing. False if another
/// library has taken the key.
bool start_detection();
/// The same, or UsageError: `subject` needs it. `expected` ends the message. Local.
void require_detection(const std::string& subject, const char* expected);
/// The same. If it is false, rank 0 logs that `option` of `component` is off because it needs to
/// detect the use of `what`. Local.
bool start_detection_for(const char* component, int rank, const char* what, const char* option);

}  // namespace tessera::sharding
