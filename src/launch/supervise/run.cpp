#include <algorithm>
#include <cerrno>
#include <chrono>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "launch/output/sink.h"
#include "launch/rendezvous_folder.h"
#include "launch/supervise/open_files.h"
#include "launch/supervise/supervisor.h"
#include "tessera/error.h"
#include "tessera/launch.h"

extern char** environ;

namespace tessera::launch {
namespace {

std::vector<std::string> current_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) result.emplace_back(*entry);
  return result;
}

std::string random_id() {
  std::random_device source;
  char text[17];
  snprintf(text, sizeof text, "%08x%08x", source(), source());
  return text;
}

Attempt make_attempt(const LaunchOptions& options, int number, const std::string& run_id,
                     bool terminal) {
  Attempt attempt;
  // Launchers on several hosts cannot agree on a secret without another one.
  if (options.nnodes == 1) attempt.secret = random_id() + random_id();
  attempt.number = number;
  attempt.run_id = run_id;
  attempt.master_addr = options.master_addr.empty() ? "127.0.0.1" : options.master_addr;
  attempt.master_port = options.master_port ? *options.master_port : free_port();
  attempt.terminal = terminal;
  winsize size{};
  if (terminal && ioctl(1, TIOCGWINSZ, &size) == 0) attempt.columns = size.ws_col;
  return attempt;
}

Outcome run_attempt(const Surroundings& around, Attempt attempt) {
  std::unique_ptr<RendezvousFolder> folder;
  const bool one_host = around.options.nnodes == 1;
  try {
    folder = std::make_unique<RendezvousFolder>();
    attempt.reports = folder->path();
    if (one_host) attempt.rendezvous = folder->path();
    around.guard.watch_folder(folder->path());
  } catch (const UsageError&) {
    if (one_host) throw;  // with several hosts only the ranks' reports are missing
  }
  const Outcome result = Supervisor(around, std::move(attempt)).run();
  folder.reset();
  around.guard.forget();
  return result;
}

/// Waits between two attempts: the delay doubles from one restart to the next, up to a minute, and
/// begins again after an attempt that ran for ten minutes. At most so many restarts an hour.
class Restarts {
 public:
  explicit Restarts(const LaunchOptions& options)
      : options_(options), delay_(options.restart_delay) {}

  void begin() { began_ = Clock::now(); }
  /// The time to wait; nullopt if there were too many restarts in the last hour.
  std::optional<std::chrono::milliseconds> next() {
    const auto now = Clock::now();
    while (!times_.empty() && now - times_.front() >= std::chrono::hours(1)) times_.pop_front();
    if (static_cast<int>(times_.size()) >= options_.restarts_per_hour) return std::nullopt;
    times_.push_back(now);
    if (now - began_ >= std::chrono::minutes(10)) delay_ = options_.restart_delay;
    const auto wait = delay_;
    delay_ = std::min<std::chrono::milliseconds>(2 * delay_, std::chrono::minutes(1));
    return wait;
  }

 private:
  const LaunchOptions& options_;
  std::chrono::milliseconds delay_;
  std::deque<Clock::time_point> times_;
  Clock::time_point began_;
};

/// Returns false if a signal requests the end meanwhile.
bool wait_for(std::chrono::milliseconds time, SignalWatch& signals) {
  const auto end = Clock::now() + time;
  for (auto left = time; left.count() > 0;
       left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now())) {
    pollfd entry{signals.fd(), POLLIN, 0};
    (void)poll(&entry, 1, static_cast<int>(left.count()));
    for (int number : signals.take()) {
      if (number == SIGTSTP) raise(SIGSTOP);
      if (number != SIGCHLD && number != SIGTSTP) return false;
    }
  }
  return true;
}

int run_attempts(const Surroundings& around) {
  const LaunchOptions& options = around.options;
  const auto say = [&](const std::string& text) {
    around.console.say(options.command + ": " + text);
  };
  const std::string run_id = random_id();
  Restarts restarts(options);
  for (int number = 0;; ++number) {
    restarts.begin();
    const Outcome outcome =
        run_attempt(around, make_attempt(options, number, run_id, around.console.out().terminal()));
    if (!outcome.not_started.empty()) say(outcome.not_started);
    if (outcome.exit_code == 0 || !outcome.cause || outcome.interrupted) return outcome.exit_code;
    if (number == options.max_restarts) return outcome.exit_code;
    const auto wait = restarts.next();
    if (!wait) {
      say("no restart: " + std::to_string(options.restarts_per_hour) +
          " in the last hour (--restarts-per-hour)");
      return outcome.exit_code;
    }
    std::string seconds = std::to_string(static_cast<double>(wait->count()) / 1000);
    seconds.erase(seconds.find_last_not_of('0') + 1);
    if (seconds.back() == '.') seconds.pop_back();
    say("restart " + std::to_string(number + 1) + " of " + std::to_string(options.max_restarts) +
        ", because " + describe(*outcome.cause) + "; waiting " + seconds + " s");
    (void)around.console.flush(around.signals.fd());
    if (!wait_for(*wait, around.signals)) return outcome.exit_code;
  }
}

/// Writes the queued output. If its reader does not read, blocks until a signal arrives.
void flush(Console& console, SignalWatch& signals) {
  while (!console.flush(signals.fd())) {
    for (int number : signals.take()) {
      if (number != SIGCHLD && number != SIGTSTP && number != SIGUSR1 && number != SIGUSR2) return;
    }
  }
}

}  // namespace

std::string own_path() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) return path.string();
  const Program found = find_program(program_invocation_name);
  if (found.path.empty()) {
    throw UsageError("/proc/self/exe: " + error.message() + ", and " + found.why +
                     ": expected /proc, or the program's path as its name");
  }
  return std::filesystem::absolute(found.path).string();
}

void open_standard_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", O_RDWR);
  }
}

int run(const LaunchOptions& options) {
  validate(options);
  open_standard_streams();
  Console console(options.command);
  const auto environment = current_environment();
  const Program program = find_program(options.program[0]);
  SignalWatch signals;
  int exit_code = program.exit_code;
  if (exit_code != 0) {
    console.say(options.command + ": " + program.why);
  } else {
    check_open_files(options, console.merged());
    sweep_stale_folders(rendezvous_base());
    if (limits_threads(options, environment)) {
      console.say(options.command +
                  ": OMP_NUM_THREADS is not set: every rank gets OMP_NUM_THREADS=1");
    }
    Guard guard;
    exit_code = run_attempts({options, program.path, environment, console, guard, signals});
  }
  flush(console, signals);
  return exit_code;
}

}  // namespace tessera::launch
