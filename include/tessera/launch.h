#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace tessera::launch {

/// The two output streams of a rank, as bits: what `--tee` and `--redirects` choose from.
enum StreamBits : int { kNoStream = 0, kStdout = 1, kStderr = 2, kBothStreams = 3 };

/// A choice of streams for every local rank: one value for all, with exceptions by local rank.
struct StreamChoice {
  int all = kNoStream;
  std::map<int, int> ranks;

  int of(int local_rank) const {
    const auto found = ranks.find(local_rank);
    return found == ranks.end() ? all : found->second;
  }
};

/// What run() starts. Defaults are one rank on this host.
struct LaunchOptions {
  /// The program and its arguments, passed on untouched. A name without a slash is looked up in
  /// PATH.
  std::vector<std::string> program;

  int nproc_per_node = 1;        ///< Ranks started here, >= 1.
  int nnodes = 1;                ///< Hosts in the world, >= 1; each runs a launcher of its own.
  std::optional<int> node_rank;  ///< This host's number in 0 … nnodes - 1; needed when nnodes > 1.

  /// Where the ranks of several hosts meet; needed when nnodes > 1. On one host: 127.0.0.1 and a
  /// free port.
  std::string master_addr;
  std::optional<int> master_port;

  /// How often all ranks are started again after a failure (one host only).
  int max_restarts = 0;

  /// Folder of the log files <log_dir>/attempt_<k>/<rank>/{stdout,stderr}.log (existing ones are
  /// overwritten). Empty: none.
  std::string log_dir;
  /// With log_dir: streams that go to the file and to the console. When `redirects` is not set
  /// either: all.
  std::optional<StreamChoice> tee;
  /// With log_dir: streams that go to the file only.
  std::optional<StreamChoice> redirects;

  /// How long the ranks may take to end after the first SIGINT, SIGTERM, SIGHUP or SIGQUIT.
  std::chrono::milliseconds grace = std::chrono::seconds(30);

  /// Name in front of the launcher's own messages.
  std::string command = "tessera run";
};

/// Starts nproc_per_node processes of the program and stays until all have ended. The role of
/// torchrun, for one fixed world; the variables of torchrun are set, and on one host
/// TESSERA_RENDEZVOUS, a fresh folder of mode 0700 through whose files the ranks meet (removed at
/// the end). docs/launcher.md has the whole contract.
///
/// - Rank 0's output is passed on byte by byte and reads the launcher's standard input; the other
/// ranks' output comes in whole
///   lines behind `[rank N] `, and their standard input is empty. A world of one rank inherits all
///   three streams.
/// - The first rank that fails is named as the root cause, with its last lines. The others get 1.5
/// s to report,
///   SIGTERM, and SIGKILL 2 s later, each rank with its process group.
/// - A first SIGINT, SIGTERM, SIGHUP or SIGQUIT is forwarded, one that comes a second later or
/// after kills at once.
/// - When the launcher itself is killed, ranks and their process groups are killed too.
///
/// Returns the exit code: 0, the root cause's code, 128 + its signal, 126 or 127 when the program
/// cannot be executed or found. Throws UsageError for an impossible option, before anything starts.
/// Call it from a process with one thread: it forks, and handles the signals above while it runs.
int run(const LaunchOptions& options);

/// Opens /dev/null in place of standard streams that are closed: else the first files or pipes that
/// the program opens get their numbers, and what it prints. For the start of a main().
void open_standard_streams();

/// Throws UsageError naming the flag, its value and what was expected.
void validate(const LaunchOptions& options);

/// Text forms of flags. Each throws UsageError naming `flag`.
int parse_integer(const std::string& flag, const std::string& text, int lowest, int highest);
/// Takes `-n N`, `-nN`, `--nproc-per-node N` and `--nproc-per-node=N` out of the words, and returns
/// N, or 0.
int take_nproc(std::vector<std::string>& words);
/// A number, or `auto` or `cpu`: the processors this process may use.
int parse_nproc(const std::string& flag, const std::string& text);
/// torchrun's form: `3`, or `0:3,2:1` for single local ranks.
StreamChoice parse_streams(const std::string& flag, const std::string& text);
/// Seconds, fractions allowed.
std::chrono::milliseconds parse_seconds(const std::string& flag, const std::string& text);

}  // namespace tessera::launch
