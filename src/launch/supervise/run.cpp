#include <memory>
#include <random>

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "launch/rendezvous_folder.h"
#include "launch/supervise/open_files.h"
#include "launch/supervise/supervisor.h"
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
  if (around.options.nnodes == 1) {
    folder = std::make_unique<RendezvousFolder>();
    attempt.rendezvous = folder->path();
    around.guard.watch_folder(folder->path());
  }
  const Outcome result = Supervisor(around, std::move(attempt)).run();
  folder.reset();
  around.guard.forget();
  return result;
}

int run_attempts(const Surroundings& around) {
  const std::string run_id = random_id();
  for (int number = 0;; ++number) {
    const Outcome outcome = run_attempt(
        around, make_attempt(around.options, number, run_id, around.console.out().terminal()));
    const std::string& command = around.options.command;
    if (!outcome.not_started.empty()) around.console.say(command + ": " + outcome.not_started);
    if (outcome.exit_code == 0 || !outcome.root || outcome.interrupted) return outcome.exit_code;
    if (number == around.options.max_restarts) return outcome.exit_code;
    around.console.say(command + ": restart " + std::to_string(number + 1) + " of " +
                       std::to_string(around.options.max_restarts) + ", because " +
                       describe(*outcome.root));
  }
}

/// Writes the queued output. If its reader does not read, blocks until a signal arrives.
void flush(Console& console, SignalWatch& signals) {
  while (!console.flush(signals.fd())) {
    for (int number : signals.take()) {
      if (number != SIGCHLD && number != SIGTSTP) return;
    }
  }
}

}  // namespace

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
    if (options.nnodes == 1) sweep_stale_folders(rendezvous_base());
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
