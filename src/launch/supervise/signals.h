#pragma once

#include <string>
#include <vector>

#include <signal.h>

#include "launch/supervise/fd.h"

namespace tessera::launch {

/// While it lives, the signals that matter to the launcher arrive as readable events: SIGINT,
/// SIGTERM, SIGHUP (unless ignored, as under nohup), SIGQUIT, SIGTSTP, SIGCHLD. SIGPIPE is ignored.
/// The former state comes back at the end.
class SignalWatch {
 public:
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int fd() const { return fd_.get(); }
  /// The numbers that arrived since the last call, in order; does not block.
  std::vector<int> take();
  /// The mask from before.
  const sigset_t& former_mask() const { return former_mask_; }

 private:
  Fd fd_;
  sigset_t former_mask_;
  struct sigaction former_pipe_;
};

/// "SIGKILL"; "signal 35" where there is no name.
std::string signal_name(int number);

}  // namespace tessera::launch
