#include <cstdio>
#include <exception>
#include <string>

#include "commands.h"
#include "tessera/detail/nearest.h"
#include "tessera/version.h"

namespace {

constexpr const char* kHelp =
    "usage: tessera COMMAND …\n"
    "\n"
    "commands:\n"
    "  run    start a program on several ranks:      tessera run -n 4 ./program args…\n"
    "  train  train a model from a config:           tessera train [-n 4] CONFIG.yaml [key=value "
    "…]\n"
    "  report write the log of one or several runs as a page of HTML:  tessera report RUN…\n"
    "  weights inspect, convert or compare files of weights:  tessera weights inspect FILE\n"
    "\n"
    "  --version, -V  version of Tessera\n"
    "  --help, -h     this text; tessera COMMAND --help shows the command's flags\n";

int dispatch(int argc, char** argv) {
  if (argc < 2) {
    std::fputs(kHelp, stderr);
    return tessera::cli::kUsageExit;
  }
  const std::string command = argv[1];
  if (command == "run") return tessera::cli::run_command(argc - 1, argv + 1);
  if (command == "train") return tessera::cli::train_command(argc - 1, argv + 1);
  if (command == "report") return tessera::cli::report_command(argc - 1, argv + 1);
  if (command == "weights") return tessera::cli::weights_command(argc - 1, argv + 1);
  if (command == "--version" || command == "-V") {
    std::puts("tessera " TESSERA_VERSION);
    return 0;
  }
  if (command == "--help" || command == "-h" || command == "help") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  const std::string hint =
      tessera::did_you_mean(command, {"run", "train", "report", "weights", "--version", "--help"});
  std::fprintf(stderr, "tessera: '%s': no such command%s\n", command.c_str(), hint.c_str());
  return tessera::cli::kUsageExit;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return dispatch(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return tessera::cli::kUsageExit;
  }
}
