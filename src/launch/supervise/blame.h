#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/supervise/report.h"

namespace tessera::launch {

/// The state of one rank, as its launcher sees it.
struct RankState {
  int rank = 0;
  pid_t pid = 0;
  std::optional<Exit> exit;
  int stopped_by = 0;  ///< The signal that has stopped it; 0 if it runs or has ended.
};

/// The cause of a failed attempt.
struct Cause {
  enum class Kind {
    failed,     ///< A rank failed by itself.
    stopped,    ///< A rank is stopped, and others waited for it in vain.
    left,       ///< A rank exited with 0 while others needed it.
    late,       ///< A rank runs, but others waited for it in vain.
    elsewhere,  ///< It began on a rank of another host.
    unknown,    ///< A rank failed because of another, unknown one.
    request,    ///< A signal asked the training to stop. It is not a failure.
  };

  Kind kind = Kind::failed;
  int rank = 0;             ///< The origin. With elsewhere and unknown: the rank of `exit`.
  pid_t pid = 0;            ///< Of `rank`.
  int signal = 0;           ///< The signal that stopped the rank, or asked for the stop.
  bool here = true;         ///< With request: a rank of this host got the signal.
  std::vector<int> others;  ///< With elsewhere: the ranks of other hosts.
  Exit exit;                ///< The end of `rank`, or the first failure if `rank` has not failed.

  /// The exit code of the launcher, never 0.
  int exit_code() const;
  /// True if the failure's origin is known.
  bool known() const { return kind != Kind::elsewhere && kind != Kind::unknown; }
};

/// Finds the cause of the failures of `ranks`, which are all ranks of this host. At least one has
/// failed. Returns nullopt if ranks that still run could show a better cause; never if `final`. In
/// this order:
///   1. a failure that is not a consequence: deaths by a signal other than abort()'s come first,
///   then
///      the first that was detected
///   2. a request to stop, which the ranks have reported
///   3. the rank that the consequences name, followed from rank to rank; see Cause::Kind Pure.
std::optional<Cause> find_cause(const std::vector<RankState>& ranks, bool final);

/// A rank is stopped, and no rank has failed because of that.
Cause cause_of_stop(const RankState& stopped);

/// "rank 2 (pid 123) was killed by SIGKILL", "rank 1 (pid 7) is stopped (SIGSTOP)".
std::string describe(const Cause& cause);

/// "root cause", or "first failure" if the failure's origin is unknown.
std::string title(const Cause& cause);

/// "; the failure began on rank 4, which is on another host", or "" if it began here or the origin
/// is unknown.
std::string origin(const Cause& cause);

/// "because of rank 1, according to its error" for a consequence.
std::string describe_reason(const Exit& consequence);

}  // namespace tessera::launch
