#pragma once

#include <string>
#include <vector>

#include <signal.h>

#include "launch/fd.h"

namespace tessera::launch {

/// While alive, the launcher's signals arrive as events on a descriptor: SIGINT, SIGTERM, SIGHUP
/// (unless ignored, as under nohup), SIGQUIT, SIGTSTP, SIGCHLD. SIGPIPE is ignored. The destructor
/// restores the previous state.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int fd() const { return fd_.get(); }
  /// The signals that have arrived since the last call, in order. Does not block.
  std::vector<int> take();
  /// The signal mask from before.
  const sigset_t& former_mask() const { return former_mask_; }

 private:
  Fd fd_;
  sigset_t former_mask_;
  struct sigaction former_pipe_;
};

/// "SIGKILL"; "signal 35" if the signal has no name.
std::string signal_name(int number);

}  // namespace tessera::launch
