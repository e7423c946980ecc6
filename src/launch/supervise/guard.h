#pragma once

#include <string>

#include <sys/types.h>

#include "launch/supervise/fd.h"

namespace tessera::launch {

/// A small process that outlives a launcher killed by SIGKILL, to do what PR_SET_PDEATHSIG cannot:
/// kill the ranks' whole process groups and remove the rendezvous folder. It learns of the
/// launcher's death by the end of a pipe, has a session of its own and ignores the terminal's
/// signals.
class Guard {
 public:
  /// Throws UsageError when the system refuses another process.
  Guard();
  /// Forgets everything, ends the process and waits for it.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void watch_group(pid_t group);
  void watch_folder(const std::string& path);
  /// The groups have ended and the folder is gone.
  void forget();

 private:
  void tell(const std::string& line);

  Fd pipe_;
  pid_t pid_ = -1;
};

}  // namespace tessera::launch
