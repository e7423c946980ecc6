#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "tessera/detail/launch_environment.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/detail/train_command.h"
#include "tessera/error.h"
#include "tessera/launch.h"
#include "tessera/step/agreement.h"
#include "tessera/train.h"
#include "train/config/config_sections.h"
#include "train/program/run_with_rollbacks.h"
#include "train/run/stop_requests.h"
#include "train/watch/watchdog.h"

namespace tessera {
namespace {

constexpr int kRunFailed = 1;
constexpr int kWrongCommand = 2;

void say(const std::string& text) {
  std::fprintf(stderr, "tessera train: %s\n", text.c_str());
  std::fflush(stderr);
}

/// True on the first rank of this host, and where the launcher does not set local ranks. Every rank
/// of a host sees the same command and the same files.
bool first_of_host() { return detail::launcher_rank().local_rank.value_or(0) == 0; }

/// A launcher reports the first rank that fails as the cause and ends the others. Ranks that
/// printed nothing therefore wait a moment before they exit.
void wait_unless_reporting(bool reports) {
  if (!reports) std::this_thread::sleep_for(std::chrono::milliseconds(200));
}

/// The file through which the first rank of a host tells the others that it has printed an error.
std::string refusal_file() {
  const char* report = std::getenv("TESSERA_REPORT");  // in the launcher's private folder
  return report && *report ? std::filesystem::path(report).replace_filename(".refused") : "";
}

/// Prints an error of a rank that has not joined its world. All ranks of a host mostly have the
/// same error, and the first rank prints it. Another rank prints its error if the first prints
/// none.
void say_before_start(const std::string& text) {
  const auto file = refusal_file();
  if (first_of_host()) {
    say(text);
    if (file.empty()) return;
    std::ofstream(file + ".new") << text;
    std::rename((file + ".new").c_str(), file.c_str());
    return;
  }
  const auto [rank, local_rank] = detail::launcher_rank();
  constexpr int kTurns = 100;
  for (int turn = 0; turn < kTurns; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    std::ifstream said(file);
    const std::string first{std::istreambuf_iterator<char>(said), std::istreambuf_iterator<char>()};
    if (said && first == text) return detail::report_agreed({rank - local_rank.value_or(0)}, text);
    if (said && !first.empty()) break;
  }
  if (!file.empty()) say("rank " + std::to_string(rank) + ": " + text);
}

/// Errors that all ranks agree on are mistakes in the command before the first step (code 2), and
/// failures such as a full disk after it (code 1).
int train_on(const Config& config, ProcessGroup group) {
  int failure = kWrongCommand;
  try {
    train::handle_signals();
    train::Heartbeat heartbeat;
    const train::Watchdog watchdog(config.train.watchdog, heartbeat, group,
                                   [] { return train::stop_requested() != 0; });
    const int signal = train::run_with_rollbacks(config, group, heartbeat, [&] {
                         failure = kRunFailed;
                       }).interrupted_by;
    return signal == 0 ? 0 : 128 + signal;
  } catch (const AgreedError& error) {
    if (group.rank() == 0) say(error.what());
    try {
      group.barrier();
    } catch (const Error&) {
      // After ProcessGroup::fail() the group has ended.
    }
    wait_unless_reporting(group.rank() == 0);
    return failure;
  }
}

int run(const Config& config) {
  int rank = detail::launcher_rank().rank;
  // A write beyond the limit on the size of files then fails with an error that names the file.
  std::signal(SIGXFSZ, SIG_IGN);
  try {
    ProcessGroup group = init_process_group(config.parallel.group);
    rank = group.rank();
    return train_on(config, std::move(group));
  } catch (const BrokenWorldError& error) {
    // The launcher recognizes the class name: a rank that lost a peer is not the cause.
    say("rank " + std::to_string(rank) + ": BrokenWorldError: " + error.what());
    wait_unless_reporting(false);
    return kRunFailed;
  } catch (const UsageError& error) {
    say("rank " + std::to_string(rank) + ": " + error.what());
    return kWrongCommand;
  } catch (const std::exception& error) {
    say("rank " + std::to_string(rank) + ": " + message_of(error));
    return kRunFailed;
  }
}

}  // namespace

int train_main(int argc, char** argv) {
  launch::open_standard_streams();
  Config config;
  try {
    const auto command = detail::parse_train_command(argc, argv);
    std::string print = command.reference ? config_reference() : command.help ? command.usage : "";
    if (print.empty()) {
      if (command.file.empty()) throw UsageError("no config given\n" + command.usage);
      if (command.ranks > 1) return detail::launch_ranks(launch::own_path(), command);
      config = load_config(command.file, command.overrides);
      print = command.dump.empty() ? "" : config.dump(command.dump == "full");
    }
    if (!print.empty()) {
      std::fputs(first_of_host() ? print.c_str() : "", stdout);
      return 0;
    }
    train::require_datasets(config);
    check_config_files(config);
  } catch (const std::exception& error) {
    say_before_start(message_of(error));
    return kWrongCommand;
  }
  return run(config);
}

}  // namespace tessera
