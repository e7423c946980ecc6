#pragma once

#include <string>
#include <utility>
#include <vector>

#include <signal.h>

#include "launch/fd.h"

namespace tessera::launch {

/// While alive, the launcher's signals arrive as events on a descriptor: SIGINT, SIGTERM, SIGHUP
/// (unless ignored, as under nohup), SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD. SIGPIPE is
/// ignored. The destructor restores the previous state. At most one exists at a time. Handlers
/// write to a pipe, because containers may refuse signalfd.
class SignalWatch {
 public:
  /// Throws UsageError if the system refuses a pipe.
  SignalWatch();
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

  int fd() const { return reader_.get(); }
  /// The signals that have arrived since the last call, in order. Does not block.
  std::vector<int> take();

 private:
  Fd reader_, writer_;
  std::vector<std::pair<int, struct sigaction>> former_;
};

/// Blocks all signals of this thread while alive. A process that is forked meanwhile does not run
/// the launcher's handlers.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &former_);
  }
  ~BlockedSignals() { sigprocmask(SIG_SETMASK, &former_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  /// The signal mask from before.
  const sigset_t& former() const { return former_; }

 private:
  sigset_t former_;
};

/// "SIGKILL"; "signal 35" if the signal has no name.
std::string signal_name(int number);

}  // namespace tessera::launch
