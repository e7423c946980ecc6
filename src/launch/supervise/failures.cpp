// The members of Supervisor that collect the ends of ranks and report the cause of a failure.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include <sys/wait.h>
#include <unistd.h>

#include "launch/identity.h"
#include "launch/supervise/supervisor.h"

namespace tessera::launch {
namespace {

// During this time survivors can print their own errors.
constexpr auto kGrace = std::chrono::milliseconds(1500);

std::optional<detail::RankReport> read_report(const std::string& path) {
  if (path.empty()) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return detail::RankReport::from_text({std::istreambuf_iterator<char>(file), {}});
}

std::deque<std::string> lines_of(const std::string& text) {
  std::deque<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

/// True if the first line of the error is among `lines`, after a prefix or not.
bool contain(const std::deque<std::string>& lines, const std::deque<std::string>& error) {
  return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
    return line.find(error.front()) != std::string::npos;
  });
}

}  // namespace

void Supervisor::collect_exits() {
  std::vector<Exit> failures;
  for (size_t local_rank = 0; local_rank < ranks_.size(); ++local_rank) {
    Rank& rank = ranks_[local_rank];
    if (rank.exit) continue;
    MemoryUse use;
    const siginfo_t info = rank.child.peek(&use);
    if (info.si_pid == 0) continue;
    rank.exit = exit_of(local_rank, info, use);
    if (rank.exit->failed()) failures.push_back(*rank.exit);
  }
  if (!failures.empty()) on_failures(failures);
}

Exit Supervisor::exit_of(size_t local_rank, const siginfo_t& info, const MemoryUse& use) {
  Exit exit;
  exit.local_rank = static_cast<int>(local_rank);
  exit.rank = global_rank(around_.options, exit.local_rank);
  exit.pid = ranks_[local_rank].child.pid();
  exit.order = ended_++;
  (info.si_code == CLD_EXITED ? exit.code : exit.signal) = info.si_status;
  exit.dumped = info.si_code == CLD_DUMPED;
  exit.by_launcher = phase_ == Phase::Terminating || phase_ == Phase::Killing;
  if (!exit.failed()) return exit;
  mux_.drain(exit.local_rank);
  auto lines = mux_.last_lines(exit.local_rank);
  if (exit.by_error()) {
    exit.report = read_report(report_path(attempt_, exit.rank));
    exit.broken_by_lines = !exit.report && mentions_broken_world(lines);
    if (exit.report) lines.push_back(exit.report->text);
  }
  exit.memory = memory_.explain(exit, lines, use);
  return exit;
}

std::vector<RankState> Supervisor::states() const {
  std::vector<RankState> result;
  for (size_t local_rank = 0; local_rank < ranks_.size(); ++local_rank) {
    const Rank& rank = ranks_[local_rank];
    result.push_back({global_rank(around_.options, static_cast<int>(local_rank)), rank.child.pid(),
                      rank.exit, rank.exit ? 0 : rank.child.stop_signal()});
  }
  return result;
}

bool Supervisor::failed() const {
  return std::any_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return rank.exit && rank.exit->failed(); });
}

void Supervisor::on_failures(const std::vector<Exit>& failures) {
  if (ordered_) return;
  if (interrupted_by_) {
    // The exit code of an interrupted program is passed on.
    if (!cause_) {
      cause_.emplace();
      cause_->exit = failures.front();
    }
    if (phase_ == Phase::Announced && !deadline_) deadline_ = Clock::now() + around_.options.grace;
    return;
  }
  if (cause_) return;
  const auto cause = find_cause(states(), alive() == 0);
  if (terminal_given_ && cause && cause->exit.rank == 0 && cause->exit.signal == SIGINT) {
    // Rank 0 has the terminal, so only it received the Ctrl-C.
    cause_ = cause;
    return interrupt(SIGINT);
  }
  if (cause && cause->kind == Cause::Kind::request) return end_by_request();
  if (phase_ == Phase::Running) {
    phase_ = Phase::Grace;
    deadline_ = Clock::now() + kGrace;
  }
  if (cause) return name_cause();
  for (const Exit& exit : failures)
    say(describe(exit) + " on " + host_name() + " " + describe_reason(exit));
}

/// Training has stopped because of a signal to one of its ranks, perhaps on another host. The
/// other ranks end by themselves.
void Supervisor::end_by_request() {
  cause_ = find_cause(states(), true);
  const std::string span = wait_for_stop(cause_->signal);
  if (alive() == 0) return;
  say(describe(cause_->exit) + ", because " + signal_name(cause_->signal) +
      " stopped the program; waiting up to " + span + " s for the other " + count_ranks(alive()));
}

void Supervisor::name_cause() {
  cause_ = find_cause(states(), true);
  say_cause();
}

void Supervisor::say_cause() const {
  std::string text =
      describe(*cause_) + " on " + host_name() + "; it is the " + title(*cause_) + origin(*cause_);
  if (alive() > 0) text += "; ending the other " + count_ranks(alive());
  say(text);
}

/// The first process of a container becomes the parent of every process whose own parent has ended.
void Supervisor::reap_orphans() const {
  if (getpid() != 1) return;
  std::ifstream children("/proc/thread-self/children");
  for (std::string child; children >> child;) {
    const auto pid = static_cast<pid_t>(std::atoi(child.c_str()));
    const bool own = std::any_of(ranks_.begin(), ranks_.end(),
                                 [&](const Rank& rank) { return rank.child.pid() == pid; });
    if (!own && pid != around_.guard.pid()) (void)waitpid(pid, nullptr, WNOHANG);
  }
}

/// Other ranks may take long to notice a stopped one: while they write a checkpoint, or after the
/// last collective.
void Supervisor::report_stopped() {
  for (const RankState& state : states()) {
    auto& since = ranks_[state.rank - global_rank(around_.options, 0)].stopped_since;
    if (state.stopped_by != SIGSTOP) {
      since.reset();
    } else if (!since) {
      since = Clock::now();
      const std::string pid = std::to_string(state.pid);
      say("rank " + std::to_string(state.rank) + " (pid " + pid +
          ") is stopped (SIGSTOP); \"kill -CONT " + pid + "\" continues it");
    }
  }
}

/// The time at which a stop has lasted too long, if another rank is not stopped.
std::optional<Clock::time_point> Supervisor::end_of_stop() const {
  std::optional<Clock::time_point> first;
  bool others = false;
  for (const Rank& rank : ranks_)
    if (!rank.stopped_since || rank.exit) others = true;
    else if (!first || *rank.stopped_since < *first) first = rank.stopped_since;
  if (!first || !others || phase_ != Phase::Running) return std::nullopt;
  return *first + around_.options.stopped_timeout;
}

void Supervisor::end_stopped() {
  const auto end = end_of_stop();
  if (!end || Clock::now() < *end) return;
  const auto all = states();
  const auto stopped = std::find_if(all.begin(), all.end(), [](const RankState& state) {
    return !state.exit && state.stopped_by == SIGSTOP;
  });
  if (stopped == all.end()) return report_stopped();
  cause_ = cause_of_stop(*stopped);
  say_cause();
  terminate();
}

void Supervisor::report() const {
  // Until now the rank that got the signal was unknown.
  if (cause_->kind == Cause::Kind::request) return say(describe(*find_cause(states(), true)));
  if (interrupted_by_ || inherits_) return;
  auto lines = mux_.last_lines(cause_->rank - global_rank(around_.options, 0));
  std::string lead = lines.empty() ? "; it wrote nothing" : "; its last lines:";
  // If ranks agree on an error, perhaps only one has printed it.
  if (cause_->exit.rank == cause_->rank && cause_->exit.report) {
    const auto error = lines_of(cause_->exit.report->text);
    if (!error.empty() && !contain(lines, error)) {
      lead = "; its error:";
      lines = error;
    }
  }
  say(title(*cause_) + ": " + describe(*cause_) + origin(*cause_) + lead);
  for (const std::string& line : lines) around_.console.say("  | " + line);
  std::string others;
  for (const Rank& rank : ranks_) {
    if (!rank.exit || rank.exit->rank == cause_->rank) continue;
    others += (others.empty() ? "" : ", ") + describe(*rank.exit) +
              (rank.exit->by_launcher ? " (launcher)" : "");
  }
  if (!others.empty()) say("the others: " + others);
}

}  // namespace tessera::launch
