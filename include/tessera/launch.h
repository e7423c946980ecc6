#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera::launch {

/// The two output streams of a rank, as bits, for `--tee` and `--redirects`.
enum StreamBits : int { kNoStream = 0, kStdout = 1, kStderr = 2, kBothStreams = 3 };

/// The streams chosen for every local rank: one value for all, with exceptions by local rank.
struct StreamChoice {
  int all = kNoStream;
  std::map<int, int> ranks;

  int of(int local_rank) const {
    const auto found = ranks.find(local_rank);
    return found == ranks.end() ? all : found->second;
  }
};

constexpr std::chrono::milliseconds kRejoinTimeout = std::chrono::seconds(60);

/// Options of run(). The defaults start one rank on this host.
struct LaunchOptions {
  /// The program and its arguments, passed on unchanged. A name without a slash is looked up in
  /// PATH.
  std::vector<std::string> program;

  int nproc_per_node = 1;  ///< Ranks started on this host, >= 1.
  int nnodes = 1;          ///< Hosts in the world, >= 1; each runs a launcher of its own.
  /// The ranks on each host, by node rank. Empty: nproc_per_node on every host. Launchers that meet
  /// (hosts_meet()) tell each other, and run() sets it.
  std::vector<int> ranks_of_nodes;
  /// Least number of hosts with which the world continues, 1 to nnodes. Default: nnodes.
  std::optional<int> min_nnodes;
  std::optional<int> node_rank;  ///< This host's number, 0 to nnodes - 1. Required if nnodes > 1.

  /// Address and port at which the ranks of several hosts find each other. Required if nnodes > 1.
  /// Default on one host: 127.0.0.1 and a free port.
  std::string master_addr;
  std::optional<int> master_port;

  /// The number of times that all ranks are started again after a failure on any host.
  int max_restarts = 0;
  /// The time that the launcher of another host may be silent before the world continues without it
  /// or ends. Only if hosts_meet(). Default: kRejoinTimeout.
  std::optional<std::chrono::milliseconds> rejoin_timeout;
  /// The wait before the first restart. It doubles with each restart, up to a minute, and begins
  /// again after an attempt that ran for ten minutes.
  std::chrono::milliseconds restart_delay = std::chrono::seconds(1);
  /// The time that a rank may be stopped (SIGSTOP) while another one runs. Longer is a failure.
  std::chrono::milliseconds stopped_timeout = std::chrono::minutes(10);
  int restarts_per_hour = 20;  ///< Restarts in an hour after which a failure is final.

  /// Folder of the log files <log_dir>/attempt_<k>/<rank>/{stdout,stderr}.log. Existing files are
  /// overwritten. Empty: no log files.
  std::string log_dir;
  /// With log_dir: streams that go to the file and to the console. Default: both streams if
  /// `redirects` is not set, else none.
  std::optional<StreamChoice> tee;
  /// Streams that go to the file only. Requires log_dir. Default: none.
  std::optional<StreamChoice> redirects;

  /// The time that the ranks get to end after the first SIGINT, SIGTERM, SIGHUP or SIGQUIT, before
  /// they are killed.
  std::chrono::milliseconds grace = std::chrono::seconds(30);

  /// Prefix of the launcher's own messages.
  std::string command = "tessera run";
};

/// Starts nproc_per_node processes of the program and returns when all have ended. Takes the role
/// of torchrun for a world of fixed size: each process gets torchrun's environment variables. On
/// one host it also gets TESSERA_RENDEZVOUS, a fresh folder for the files through which the ranks
/// find each other. docs/launcher.md has the whole contract: output, input, failures and signals.
///
/// Returns 0, the exit code of the root cause, 128 + the signal that killed or stopped it, 126 when
/// the program cannot be executed, or 127 when it is not found. Throws UsageError for impossible
/// options, before it starts a process. Call it from a process with one thread, because it forks
/// and handles the signals above while it runs.
int run(const LaunchOptions& options);

/// The path of the running program: the target of /proc/self/exe or, without /proc, the name that
/// it was called by, looked up as a shell does. Throws UsageError if it is not found. Local.
std::string own_path();

/// Opens /dev/null for each standard stream that is closed. Otherwise the first files or pipes that
/// the program opens would get the numbers of these streams, and receive its output. Call it at the
/// start of main().
void open_standard_streams();

/// Throws UsageError naming the flag, its value and the expected values, unless `options` are
/// possible.
void validate(const LaunchOptions& options);

/// True if the launchers of several hosts meet, to start all ranks again together: nnodes > 1, and
/// max_restarts > 0 or min_nnodes < nnodes.
bool hosts_meet(const LaunchOptions& options);
/// The number of ranks on all hosts.
int64_t world_size(const LaunchOptions& options);

// Parsers of the flags' text forms. Each throws UsageError naming `flag`.

/// An integer from `lowest` to `highest`.
int parse_integer(const std::string& flag, const std::string& text, int lowest, int highest);
/// For programs that start `nproc` ranks of themselves because of `-n`: throws UsageError when a
/// launcher has started this process already (WORLD_SIZE is set).
void check_no_launcher(int nproc);
/// A number of ranks >= 1, or `auto` or `cpu` for the number of processors that this process may
/// use.
int parse_nproc(const std::string& flag, const std::string& text);
/// torchrun's form: `3` for all local ranks, or `0:3,2:1` for some of them.
StreamChoice parse_streams(const std::string& flag, const std::string& text);
/// Sets nnodes from `4`, and min_nnodes too from `2:4`.
void parse_nnodes(const std::string& flag, const std::string& text, LaunchOptions& options);
/// Seconds from 0 to 1000000, with fractions.
std::chrono::milliseconds parse_seconds(const std::string& flag, const std::string& text);

}  // namespace tessera::launch
#pragma GCC visibility pop
