#pragma once

#include <string>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/types.h>

#include "launch/supervise/fd.h"

namespace tessera::launch {

/// Where a program name leads, as a shell would find it.
struct Program {
  std::string path;   ///< Empty when it cannot be run; then:
  int exit_code = 0;  ///< 127 not found, 126 found but not executable,
  std::string why;    ///< and a sentence that says so.
};
Program find_program(const std::string& name);

/// A message and exit code for an execve that failed with `error`.
Program exec_failure(const std::string& path, int error);

struct ChildSpec {
  int rank = 0;  ///< For messages.
  std::string path;
  std::vector<std::string> arguments;    ///< argv, the program's name first.
  std::vector<std::string> environment;  ///< NAME=value.
  int in = 0, out = 1, err = 2;          ///< Descriptors of the launcher that become 0, 1, 2.
  sigset_t mask;                         ///< Signal mask the program starts with.
};

/// A started rank: leader of a process group of its own that has its pid as number. It is killed
/// when the launcher dies. The zombie is kept until reap(), so that neither pid nor group can be
/// taken by another process meanwhile.
class Child {
 public:
  /// Throws UsageError when the system refuses another process.
  explicit Child(const ChildSpec& spec);

  /// Waits until the program was executed; 0, or the errno of execve.
  int wait_for_exec();

  pid_t pid() const { return pid_; }
  /// Readable once the process has ended.
  int end_fd() const { return end_fd_.get(); }
  /// The wait status as siginfo when it has ended (si_pid != 0); does not block, does not reap.
  siginfo_t peek() const;
  /// The signal that stopped it since the last call, or 0.
  int take_stop_signal() const;
  void signal_group(int number) const;
  void reap() const;

 private:
  pid_t pid_ = -1;
  Fd end_fd_, exec_fd_;
};

}  // namespace tessera::launch
