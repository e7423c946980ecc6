#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "launch/supervise/report.h"

namespace tessera::launch {

/// The memory of a rank that has ended, as the launcher saw it.
struct MemoryUse {
  int64_t peak = 0;                  ///< Largest resident memory, in bytes.
  std::optional<int64_t> addresses;  ///< RLIMIT_AS (`ulimit -v`), in bytes; nullopt: no limit.
};

/// Tells whether memory ran out. The launcher and its ranks are in one control group.
class MemoryWatch {
 public:
  /// Remembers the number of processes that the kernel has killed for memory so far. `cgroups`: the
  /// folder where the control groups are mounted; `own`: the file that names this process's groups;
  /// `vmstat`: the counters of the whole host, used if the control group has none.
  explicit MemoryWatch(const std::string& cgroups = "/sys/fs/cgroup",
                       const std::string& own = "/proc/self/cgroup",
                       const std::string& vmstat = "/proc/vmstat");

  /// A text about the end of a rank if memory ran out, else "": the kernel killed it, or its last
  /// lines are the error of an allocation. They name the limit and the rank's peak.
  std::string explain(const Exit& exit, const std::deque<std::string>& last_lines,
                      const MemoryUse& use) const;

  /// The number of processes that the kernel has killed for memory since the construction.
  int64_t kills() const;
  /// The smallest limit of the control group and those above it, in bytes; nullopt: none.
  std::optional<int64_t> limit() const;

 private:
  int64_t counter() const;

  std::string root_;    ///< Topmost control group.
  std::string group_;   ///< Path of the own one below it, "" or with a leading slash.
  std::string limit_;   ///< Name of the file with the limit.
  std::string events_;  ///< Path of the file with the counter `oom_kill`.
  int64_t before_ = 0;
};

}  // namespace tessera::launch
