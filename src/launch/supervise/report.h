#pragma once

#include <deque>
#include <string>
#include <vector>

#include <sys/types.h>

namespace tessera::launch {

/// How a rank ended.
struct Exit {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = 0;
  int code = 0;  ///< When signal is 0.
  int signal = 0;
  bool dumped = false;  ///< It wrote a core file.
  /// It failed because another rank had failed: its last lines mention BrokenWorldError.
  bool consequence = false;
  bool by_launcher = false;  ///< It ended after the launcher had signalled it.

  bool failed() const { return code != 0 || signal != 0; }
  /// The exit code as a shell reports it: the code, or 128 + signal.
  int shell_code() const { return signal ? 128 + signal : code; }
};

/// Returns the index of the failure that most likely caused the others. `failures` is in the order
/// of detection. Deaths by a signal other than abort()'s come first, then other failures, then
/// consequences.
size_t root_cause(const std::vector<Exit>& failures);

/// True if the last lines show that the rank failed because another rank had failed.
bool mentions_broken_world(const std::deque<std::string>& last_lines);

/// "rank 2 (pid 123) was killed by SIGKILL", "rank 0 (pid 7) exited with code 3".
std::string describe(const Exit& exit);

/// The name of the reported failure in messages: "root cause", or "first failure" for a consequence
/// whose cause is not on this host.
std::string title(const Exit& exit);

/// "4 ranks", "1 rank".
std::string count_ranks(size_t count);

std::string host_name();

}  // namespace tessera::launch
