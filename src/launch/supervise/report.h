#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "tessera/detail/rank_report.h"

namespace tessera::launch {

/// The end of a rank.
struct Exit {
  int rank = 0;
  int local_rank = 0;
  pid_t pid = 0;
  int order = 0;  ///< Position among the ends that the launcher has detected.
  int code = 0;   ///< Valid if signal is 0.
  int signal = 0;
  bool dumped = false;       ///< It wrote a core file.
  bool by_launcher = false;  ///< It ended after the launcher had signalled it.
  std::string memory;        ///< A text about its end if memory ran out; else empty.
  /// Its own report about its end; nullopt if it reported nothing, or died by a signal other than
  /// abort()'s.
  std::optional<detail::RankReport> report;
  /// It reported nothing, but its last lines mention BrokenWorldError.
  bool broken_by_lines = false;

  bool failed() const { return code != 0 || signal != 0; }
  /// An error ended it: an exit code, or abort() after an error that was not caught.
  bool by_error() const;
  /// The failure began on another rank.
  bool consequence() const;
  /// The exit code as a shell reports it: the code, or 128 + signal.
  int shell_code() const { return signal ? 128 + signal : code; }
};

/// True if the last lines show that the rank failed because another rank had failed.
bool mentions_broken_world(const std::deque<std::string>& last_lines);

/// "rank 2 (pid 123)".
std::string name_of_rank(int rank, pid_t pid);

/// "rank 2 (pid 123) was killed by SIGKILL", "rank 0 (pid 7) exited with code 3".
std::string describe(const Exit& exit);

/// "rank 2", "ranks 1, 3".
std::string list_ranks(const std::vector<int>& ranks);

/// "4 ranks", "1 rank".
std::string count_ranks(size_t count);

}  // namespace tessera::launch
