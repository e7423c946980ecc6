#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>

#include "tessera/error.h"
#include "tessera/train.h"
#include "tessera/agreement.h"

namespace tessera {
namespace {

constexpr const char* kUsage =
    "usage: tessera train CONFIG.yaml [key=value ...]\n"
    "  CONFIG.yaml   what to train; docs/config.md lists the keys\n"
    "  key=value     replaces a value, for example optimizer.lr=3e-4 or optimizer.betas='[0.9, 0.99]'\n";

constexpr int kRunFailed = 1;
constexpr int kWrongCommand = 2;

void say(const std::string& text) {
  std::fprintf(stderr, "tessera train: %s\n", text.c_str());
  std::fflush(stderr);
}

/// The first rank of this host, as its launcher counts. Every rank of a host sees the same command and the same files.
bool first_of_host() {
  for (const char* name : {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    if (const char* value = std::getenv(name)) {
      return std::string(value) == "0";
    }
  }
  return true;
}

/// A launcher takes the first rank that fails for the cause and ends the others: let it be the one that said why.
void leave_after_the_speaker(bool speaker) {
  if (!speaker) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
}

int rank_in_environment() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (const char* value = std::getenv(name)) {
      return std::atoi(value);
    }
  }
  return 0;
}

bool wants_help(int argc, char** argv) {
  return argc > 1 && (std::string(argv[1]) == "-h" || std::string(argv[1]) == "--help");
}

Config config_of(int argc, char** argv) {
  if (argc < 2) {
    throw UsageError(std::string("no config given\n") + kUsage);
  }
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-') {
      throw UsageError(std::string(argv[i]) + ": unknown option\n" + kUsage);
    }
  }
  Config config = load_config(argv[1], {argv + 2, argv + argc});
  check_config_files(config);
  return config;
}

int run(const Config& config) {
  int rank = rank_in_environment();
  try {
    ProcessGroup group = init_process_group(config.parallel.group);
    rank = group.rank();
    try {
      run_training(config, group);
      return 0;
    } catch (const AgreedError& error) {
      if (rank == 0) {
        say(error.what());
      }
      group.barrier();
      leave_after_the_speaker(rank == 0);
      return kWrongCommand;
    }
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
  if (wants_help(argc, argv)) {
    std::fputs(first_of_host() ? kUsage : "", stdout);
    return 0;
  }
  Config config;
  try {
    config = config_of(argc, argv);
  } catch (const std::exception& error) {
    if (first_of_host()) {
      say(message_of(error));
    }
    leave_after_the_speaker(first_of_host());
    return kWrongCommand;
  }
  return run(config);
}

}  // namespace tessera
