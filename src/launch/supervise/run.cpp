#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "launch/identity.h"
#include "launch/output/sink.h"
#include "launch/rendezvous_folder.h"
#include "launch/restarts.h"
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

/// Returns false if a signal requests the end meanwhile.
bool wait_for(std::chrono::milliseconds time, SignalWatch& signals) {
  const auto end = Clock::now() + time;
  for (auto left = time; left.count() > 0;
       left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now())) {
    pollfd entry{signals.fd(), POLLIN, 0};
    (void)poll(&entry, 1, static_cast<int>(left.count()));
    if (end_requested(signals) != 0) return false;
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
    restarts.begin(Clock::now());
    const Outcome outcome = run_attempt(around, number, run_id);
    if (!outcome.not_started.empty()) say(outcome.not_started);
    if (outcome.exit_code == 0 || !outcome.cause || outcome.interrupted) return outcome.exit_code;
    const auto wait = restarts.next(Clock::now());
    if (!wait) {
      if (!restarts.refusal().empty()) say(restarts.refusal());
      return outcome.exit_code;
    }
    say("restart " + restarts.count() + ", because " + describe(*outcome.cause) + "; waiting " +
        seconds_text(*wait) + " s");
    (void)around.console.flush(around.signals.fd());
    if (!wait_for(*wait, around.signals)) return outcome.exit_code;
  }
}

/// Writes the queued output. If its reader does not read, blocks until a signal arrives.
void flush(Console& console, SignalWatch& signals) {
  while (!console.flush(signals.fd(), std::chrono::hours(24 * 365))) {
    for (int number : signals.take())
      if (number != SIGCHLD && number != SIGTSTP && number != SIGUSR1 && number != SIGUSR2) return;
  }
}

}  // namespace

Outcome run_attempt(const Surroundings& around, int number, const std::string& run_id) {
  Attempt attempt = make_attempt(around.options, number, run_id, around.console.out().terminal());
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
  Outcome result = Supervisor(around, std::move(attempt)).run();
  folder.reset();
  around.guard.forget();
  return result;
}

int end_requested(SignalWatch& signals) {
  for (int number : signals.take()) {
    if (number == SIGTSTP) raise(SIGSTOP);
    if (number != SIGCHLD && number != SIGTSTP) return number;
  }
  return 0;
}

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
  for (int fd = 0; fd < 3; ++fd)
    if (fcntl(fd, F_GETFD) < 0) (void)!open("/dev/null", O_RDWR);
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
    RoundOrders none;
    const Surroundings around{options, program.path, environment, console, guard, signals, none};
    exit_code = hosts_meet(options) ? run_rounds(around) : run_attempts(around);
  }
  flush(console, signals);
  return exit_code;
}

}  // namespace tessera::launch
