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
  bool dumped = false;  ///< A core was written.
  /// Its last lines speak of a broken world: it died because another rank had.
  bool consequence = false;
  bool by_launcher = false;  ///< After the launcher had asked it to end.

  bool failed() const { return code != 0 || signal != 0; }
  /// As a shell counts: the code, or 128 + signal.
  int shell_code() const { return signal ? 128 + signal : code; }
};

/// Index of the failure that most likely brought the others about, among failures in the order
/// noticed: consequences last; before the others, deaths by a signal that is not the program's own
/// abort().
size_t root_cause(const std::vector<Exit>& failures);

/// Whether last lines show that the rank died because another one had.
bool speaks_of_broken_world(const std::deque<std::string>& last_lines);

/// "rank 2 (pid 123) was killed by SIGKILL", "rank 0 (pid 7) exited with code 3".
std::string describe(const Exit& exit);

/// What the failure that a run is said to have ended by is called: "root cause", or "first failure"
/// for a consequence whose cause is not among the ranks of this host.
std::string title(const Exit& exit);

/// "4 ranks", "1 rank".
std::string count_ranks(size_t count);

std::string host_name();

}  // namespace tessera::launch
