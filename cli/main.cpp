#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "commands.h"
#include "sibling.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/version.h"

namespace {

int weights_command(int argc, char** argv) {
  std::vector<std::string> program{tessera::cli::sibling_path("tessera-weights")};
  program.insert(program.end(), argv + 1, argv + argc);
  return tessera::cli::replace_process(program);
}

struct Command {
  const char *name, *purpose;
  int (*run)(int argc, char** argv);
};

constexpr Command kCommands[] = {
    {"run", "Start a program on several ranks: tessera run -n 4 ./program args…",
     tessera::cli::run_command},
    {"train", "Train a model from a config: tessera train [-n 4] CONFIG.yaml [key=value …]",
     tessera::cli::train_command},
    {"report", "Write the log of one or several runs as a page of HTML: tessera report RUN…",
     tessera::cli::report_command},
    {"weights", "Inspect, convert or compare files of weights: tessera weights inspect FILE",
     weights_command}};

int dispatch(int argc, char** argv) {
  CLI::App app("Distributed training. tessera COMMAND --help shows the command's flags.",
               "tessera");
  app.set_version_flag("--version,-V", "tessera " TESSERA_VERSION);
  std::vector<std::string> known{"--version", "--help"};
  for (const auto& command : kCommands) {
    if (argc > 1 && argv[1] == std::string(command.name)) return command.run(argc - 1, argv + 1);
    app.add_subcommand(command.name, command.purpose);
    known.emplace_back(command.name);
  }
  app.add_subcommand("help", "Print this text");
  const std::string text = app.help();  // after parse() it would be the subcommand's
  try {
    app.parse(std::min(argc, 2), argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);
    std::fprintf(stderr, "tessera: '%s': no such command%s\n", argv[1],
                 tessera::did_you_mean(argv[1], known).c_str());
    return tessera::cli::kUsageExit;
  }
  std::fputs(text.c_str(), argc > 1 ? stdout : stderr);
  return argc > 1 ? 0 : tessera::cli::kUsageExit;
}

}  // namespace

int tessera::cli::run_app(const CLI::App& app, const std::function<int()>& body) {
  std::string what;
  try {
    return body();
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    what = error.what();
  } catch (const UsageError& error) {
    what = error.what();
  }
  const char* name = app.get_name().c_str();
  std::fprintf(stderr, "%s: %s (%s --help shows the flags)\n", name, what.c_str(), name);
  return kUsageExit;
}

int main(int argc, char** argv) {
  try {
    return dispatch(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return tessera::cli::kUsageExit;
  }
}
