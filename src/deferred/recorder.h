#pragma once

#include <torch/types.h>

namespace tessera::deferred {

/// The dispatch key of the recording. libtorch reserves it for deferred construction and does not
/// use it. It is above autograd and autocast, so composite operators must be recognised: the log
/// has the operators that compute.
inline constexpr auto kRecordingKey = c10::DispatchKey::DeferredInit;

/// Registers the fallback that records operators, once. False if another library has one.
bool start_recording();

/// True if this thread defers large tensors.
bool& deferring();

/// While alive, this thread neither records operators nor defers tensors.
class Unrecorded {
 public:
  Unrecorded() : off_(kRecordingKey), before_(std::exchange(deferring(), false)) {}
  ~Unrecorded() { deferring() = before_; }
  Unrecorded(const Unrecorded&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard off_;
  bool before_;
};

}  // namespace tessera::deferred
