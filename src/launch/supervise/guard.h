#pragma once

#include <string>

#include <sys/types.h>

#include "launch/fd.h"

namespace tessera::launch {

/// A small process that survives a launcher killed by SIGKILL. It then kills the ranks' whole
/// process groups, which PR_SET_PDEATHSIG cannot do, and removes the rendezvous folder. It detects
/// the launcher's death by the end of a pipe, has a session of its own and ignores the terminal's
/// signals.
class Guard {
 public:
  /// Starts the process. Throws UsageError if the system refuses another process.
  Guard();
  /// Calls forget(), ends the process and waits for it.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  pid_t pid() const { return pid_; }
  void watch_group(pid_t group);
  void watch_folder(const std::string& path);
  /// Stops watching all groups and the folder, because they no longer exist.
  void forget();

 private:
  void send(const std::string& line);

  Fd pipe_;
  pid_t pid_ = -1;
};

}  // namespace tessera::launch
