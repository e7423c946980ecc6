#pragma once

#include <string>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/types.h>

#include "launch/fd.h"
#include "launch/supervise/memory_watch.h"

namespace tessera::launch {

/// The result of looking up a program name as a shell does.
struct Program {
  std::string path;   ///< Empty if it cannot be run.
  int exit_code = 0;  ///< If it cannot be run: 127 not found, 126 found but not executable.
  std::string why;    ///< If it cannot be run: the reason.
};
Program find_program(const std::string& name);

/// The exit code and reason for an execve that failed with errno `error`.
Program exec_failure(const std::string& path, int error);

struct ChildSpec {
  int rank = 0;  ///< For messages.
  std::string path;
  std::vector<std::string> arguments;    ///< argv, the program's name first.
  std::vector<std::string> environment;  ///< NAME=value.
  int in = 0, out = 1, err = 2;          ///< Descriptors of the launcher that become 0, 1 and 2.
};

/// A started rank, the leader of its own process group. The system kills it when the launcher dies.
/// Its zombie is kept until reap(), so that no other process can get its pid or group number
/// before.
class Child {
 public:
  /// Starts the process. Throws UsageError if the system refuses another process.
  explicit Child(const ChildSpec& spec);

  /// Blocks until the program is executed. Returns 0, or the errno of execve.
  int wait_for_exec();

  pid_t pid() const { return pid_; }
  /// Readable once the process has ended. -1 where the system refuses such descriptors, as some
  /// containers do: then SIGCHLD alone reports the end.
  int end_fd() const { return end_fd_.get(); }
  /// The wait status if the process has ended, else si_pid == 0. Does not block or reap. If it has
  /// ended and `use` is given, sets it.
  siginfo_t peek(MemoryUse* use = nullptr) const;
  /// The signal that has stopped the process, or 0 if it is not stopped.
  int stop_signal() const;
  /// Sends a signal to the process group.
  void signal_group(int number) const;
  /// Blocks until the process has ended and removes its zombie.
  void reap() const;

 private:
  pid_t pid_ = -1;
  Fd end_fd_, exec_fd_;
};

}  // namespace tessera::launch
