#include "launch/supervise/supervisor.h"

#include <algorithm>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>

#include "launch/identity.h"
#include "launch/restarts.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

// Together with the grace of a failure it is below 5 s, the limit for the end of all ranks.
constexpr auto kTermination = std::chrono::seconds(2);
// SIGKILL takes effect at once, unless a process hangs in the kernel.
constexpr auto kKilling = std::chrono::seconds(5);
// One request to stop may cause several signals: timeout(1) signals its child and then the group, a
// closed terminal causes SIGHUP from the kernel and from the shell, systemd sends SIGHUP and
// SIGTERM. Only a later signal is a second request.
constexpr auto kSameStop = std::chrono::seconds(1);
constexpr const char* kSecondSignal = " (a second signal after 1 s kills at once)";

}  // namespace

Supervisor::Supervisor(Surroundings surroundings, Attempt attempt)
    : around_(surroundings),
      attempt_(std::move(attempt)),
      mux_(around_.console),
      inherits_(inherits_streams(around_.options)) {}

Outcome Supervisor::run() {
  try {
    start_ranks();
    if (const auto failed = failed_exec()) {
      end_groups();
      Outcome result;
      result.exit_code = failed->exit_code;
      result.not_started = failed->why;
      return result;
    }
    watch();
  } catch (...) {
    end_groups();
    throw;
  }
  if (!cause_ && !ordered_ && failed()) name_cause();
  end_groups();
  take_terminal();
  mux_.finish();
  if (cause_) report();
  return outcome();
}

void Supervisor::start_ranks() {
  for (int local_rank = 0; local_rank < around_.options.nproc_per_node; ++local_rank)
    start_rank(local_rank);
}

void Supervisor::start_rank(int local_rank) {
  const LaunchOptions& options = around_.options;
  ChildSpec spec;
  spec.rank = global_rank(options, local_rank);
  spec.path = around_.path;
  spec.arguments = options.program;
  spec.environment = rank_environment(options, attempt_, local_rank, around_.environment);

  const int rank = spec.rank;
  Mux::Ends ends;
  if (!inherits_) {
    StreamPlan plan = plan_streams(options, local_rank);
    plan.folder = options.log_dir + "/attempt_" + std::to_string(attempt_.number) + "/" +
                  std::to_string(rank);
    ends = mux_.add_rank(plan);
    spec.out = ends.out.get();
    spec.err = ends.err ? ends.err.get() : ends.out.get();
  }
  Fd null;
  if (rank != 0) {
    null = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    spec.in = null.get();
  }
  ranks_.push_back({Child(spec)});
  around_.guard.watch_group(ranks_.back().child.pid());
}

std::optional<Program> Supervisor::failed_exec() {
  for (Rank& rank : ranks_)
    if (const int error = rank.child.wait_for_exec()) return exec_failure(around_.path, error);
  return std::nullopt;
}

void Supervisor::watch() {
  std::vector<pollfd> polled;
  while (alive() > 0 && phase_ != Phase::Lost) {
    wait_for_events(polled);
    // Signals come first, because ranks that ended by the same request to stop have not failed.
    // Exits come next, because long output must not delay them.
    for (int number : around_.signals.take()) on_signal(number);
    collect_exits();
    mux_.handle(polled.data() + 1 + ranks_.size());
    end_stopped();
    follow_order();
    if (deadline_ && Clock::now() >= *deadline_) on_deadline();
  }
}

void Supervisor::wait_for_events(std::vector<pollfd>& polled) {
  polled.clear();
  polled.push_back({around_.signals.fd(), POLLIN, 0});
  // poll() skips negative descriptors.
  for (const Rank& rank : ranks_)
    polled.push_back({rank.exit ? -1 : rank.child.end_fd(), POLLIN, 0});
  mux_.add_polled(polled);
  polled.push_back({around_.orders.fd(), POLLIN, 0});
  if (poll(polled.data(), polled.size(), poll_timeout()) < 0)
    for (pollfd& entry : polled) entry.revents = 0;
}

int Supervisor::poll_timeout() const {
  auto next = deadline_;
  for (const auto& other : {mux_.deadline(), end_of_stop()})
    if (other && (!next || *other < *next)) next = other;
  if (!next) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

void Supervisor::on_signal(int number) {
  if (number == SIGCHLD) {
    reap_orphans();
    report_stopped();
    return serve_terminal();
  }
  if (number == SIGTSTP) return suspend();
  if (phase_ == Phase::Killing) return;
  if (number == SIGUSR1 || number == SIGUSR2) return announce(number);
  if (stop_requested_at_ && Clock::now() - *stop_requested_at_ >= kSameStop)
    return kill_now("second signal " + signal_name(number));
  if (stop_requested_at_) return;
  if (phase_ == Phase::Running || phase_ == Phase::Announced) return interrupt(number);
  stop_requested_at_ = Clock::now();
  say(signal_name(number) + ": ending the ranks" + kSecondSignal);
}

/// A batch system announces the end of its time with SIGUSR1 or SIGUSR2. The ranks may take all of
/// the time that is left, so there is no deadline, and a later signal is the first request to stop.
void Supervisor::announce(int number) {
  say(signal_name(number) + ": forwarded to " + count_ranks(alive()));
  signal_all(number);
  if (phase_ != Phase::Running) return;
  interrupted_by_ = number;
  phase_ = Phase::Announced;
}

void Supervisor::interrupt(int number) {
  stop_requested_at_ = Clock::now();
  const std::string span = wait_for_stop(number);
  say(signal_name(number) + ": forwarded to " + count_ranks(alive()) + "; waiting up to " + span +
      " s" + kSecondSignal);
  signal_all(number);
}

/// The ranks have been asked to stop. Returns the seconds of the grace time.
std::string Supervisor::wait_for_stop(int number) {
  interrupted_by_ = number;
  phase_ = Phase::Interrupted;
  deadline_ = Clock::now() + around_.options.grace;
  return seconds_text(around_.options.grace);
}

void Supervisor::on_deadline() {
  switch (phase_) {
    case Phase::Grace:
      if (!cause_) name_cause();
      terminate();
      break;
    case Phase::Terminating:
      kill_now("no end after SIGTERM");
      break;
    case Phase::Announced:
    case Phase::Interrupted:
      kill_now("no end within the grace time");
      break;
    case Phase::Killing:
      phase_ = Phase::Lost;
      say("gave up waiting for " + count_ranks(alive()) + " that SIGKILL does not end");
      break;
    case Phase::Running:
    case Phase::Lost:
      deadline_.reset();
  }
}

/// Another host may end the round. If the ranks of this host are ending already, nothing needs to
/// be done.
void Supervisor::follow_order() {
  if (phase_ != Phase::Running) return;
  const auto order = around_.orders.end_of_round();
  if (!order) return;
  const bool stop = order->kind == Order::Kind::stop;
  say("ending " + count_ranks(alive()) + " of " + host_name() + ": " + order->text);
  if (order->kind == Order::Kind::fail) {
    ordered_ = true;
    return terminate();
  }
  // A second signal would end ranks that are stopping already.
  ordered_ = !stop;
  (void)wait_for_stop(SIGTERM);
  if (!stop) signal_all(SIGTERM);
}

void Supervisor::terminate() {
  phase_ = Phase::Terminating;
  deadline_ = Clock::now() + kTermination;
  signal_all(SIGTERM);
}

void Supervisor::kill_now(const std::string& why) {
  phase_ = Phase::Killing;
  deadline_ = Clock::now() + kKilling;
  say(why + ": killing " + count_ranks(alive()));
  signal_all(SIGKILL);
}

void Supervisor::signal_all(int number) {
  for (const Rank& rank : ranks_) {
    if (rank.exit && number != SIGKILL) continue;
    rank.child.signal_group(number);
    // A stopped process handles no other signal until it continues.
    if (number != SIGKILL && number != SIGTSTP && number != SIGCONT)
      rank.child.signal_group(SIGCONT);
  }
}

void Supervisor::end_groups() {
  // The zombies of the ranks still hold their group numbers, so no other process is signalled.
  for (const Rank& rank : ranks_) {
    rank.child.signal_group(SIGKILL);
    if (phase_ != Phase::Lost || rank.exit) rank.child.reap();
  }
}

size_t Supervisor::alive() const {
  return std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return !rank.exit; });
}

Outcome Supervisor::outcome() const {
  Outcome result;
  result.asked = stop_requested_at_.has_value();
  result.ordered = ordered_;
  result.interrupted = stop_requested_at_.has_value() || interrupted_by_ != 0;
  result.cause = cause_;
  if (phase_ == Phase::Killing && interrupted_by_) result.exit_code = 128 + interrupted_by_;
  else if (cause_) result.exit_code = cause_->exit_code();
  else if (ordered_) result.exit_code = 1;
  else if (phase_ == Phase::Lost) result.exit_code = 128 + SIGKILL;
  return result;
}

void Supervisor::say(const std::string& text) const {
  around_.console.say(around_.options.command + ": " + text);
}

}  // namespace tessera::launch
