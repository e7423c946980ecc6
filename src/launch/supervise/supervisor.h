#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/environment.h"
#include "launch/output/mux.h"
#include "launch/rounds/documents.h"
#include "launch/supervise/blame.h"
#include "launch/supervise/child.h"
#include "launch/supervise/guard.h"
#include "launch/supervise/memory_watch.h"
#include "launch/supervise/signal_watch.h"

namespace tessera::launch {

/// The end of one attempt.
struct Outcome {
  int exit_code = 0;
  std::optional<Cause> cause;  ///< The cause of the end, if the attempt failed or was interrupted.
  bool interrupted = false;    ///< A signal requested the launcher to end.
  bool asked = false;          ///< A signal to the launcher requested an end at once.
  bool ordered = false;        ///< The order of another host's launcher ended the attempt.
  std::string not_started;     ///< Empty, or why the program could not be executed.
};

/// The objects that supervisors of successive attempts share.
struct Surroundings {
  const LaunchOptions& options;
  const std::string& path;  ///< Path of the program.
  const std::vector<std::string>& environment;
  Console& console;
  Guard& guard;
  SignalWatch& signals;
  RoundOrders& orders;
};

/// Starts the ranks of one attempt and supervises them until the last one has ended. A failure is
/// reported at once as the root cause, unless it is a consequence of another failure: then the
/// supervisor waits for the other one during phase Grace, and find_cause() decides.
///
///   Running --failure--> Grace --1.5 s--> Terminating (SIGTERM) --2 s--> Killing (SIGKILL)
///   Running --signal---> Interrupted --the user's grace, or a later second signal--> Killing
///   Running --order--> Terminating or Interrupted
///   Running --SIGUSR1 or SIGUSR2--> Announced --another signal--> Interrupted
class Supervisor {
 public:
  Supervisor(Surroundings surroundings, Attempt attempt);

  Outcome run();

 private:
  enum class Phase { Running, Grace, Terminating, Announced, Interrupted, Killing, Lost };

  struct Rank {
    Child child;
    std::optional<Exit> exit = std::nullopt;
    std::optional<Clock::time_point> stopped_since =
        std::nullopt;  ///< Stopped by SIGSTOP, as of the last SIGCHLD.
  };

  void start_ranks();
  void start_rank(int local_rank);
  std::optional<Program> failed_exec();
  void watch();
  int poll_timeout() const;
  void wait_for_events(std::vector<pollfd>& polled);

  void collect_exits();
  Exit exit_of(size_t local_rank, const siginfo_t& info, const MemoryUse& use);
  void on_failures(const std::vector<Exit>& failures);
  std::vector<RankState> states() const;
  bool failed() const;
  void name_cause();
  void say_cause() const;
  void end_by_request();
  void on_signal(int number);
  void on_deadline();
  void follow_order();
  void announce(int number);
  void interrupt(int number);
  std::string wait_for_stop(int number);
  void terminate();
  void kill_now(const std::string& why);

  void signal_all(int number);
  void end_groups();
  void suspend();
  void serve_terminal();
  void reap_orphans() const;
  void report_stopped();
  std::optional<Clock::time_point> end_of_stop() const;
  void end_stopped();
  void take_terminal();

  size_t alive() const;
  Outcome outcome() const;
  void report() const;
  void say(const std::string& text) const;

  Surroundings around_;
  Attempt attempt_;
  Mux mux_;
  std::vector<Rank> ranks_;
  bool inherits_;  ///< See inherits_streams().
  Phase phase_ = Phase::Running;
  std::optional<Clock::time_point> deadline_;
  MemoryWatch memory_;
  int ended_ = 0;               ///< The number of ranks that have ended.
  std::optional<Cause> cause_;  ///< Set once it has been reported.
  int interrupted_by_ = 0;
  bool ordered_ = false;  ///< An order ends the ranks.
  /// The time of the first signal that requests an end.
  std::optional<Clock::time_point> stop_requested_at_;
  bool terminal_given_ = false;
};

/// Attempt `number` of the options of `around`, on this host: makes its folder, and runs the ranks
/// until the last one has ended.
Outcome run_attempt(const Surroundings& around, int number, const std::string& run_id);

/// Takes the signals that have arrived between two attempts. Returns the one
/// that requests an end, or 0.
int end_requested(SignalWatch& signals);

/// Runs the rounds of several hosts that meet, see hosts_meet(). Returns the launcher's exit code.
int run_rounds(const Surroundings& around);

}  // namespace tessera::launch
