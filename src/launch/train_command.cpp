#include "tessera/detail/train_command.h"

#include <CLI/CLI.hpp>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::detail {

std::vector<std::string> TrainCommand::words() const {
  std::vector<std::string> words;
  if (!file.empty()) words.push_back(file);
  words.insert(words.end(), overrides.begin(), overrides.end());
  if (!dump.empty()) words.insert(words.end(), {"--dump-config", dump});
  if (reference) words.push_back("--config-reference");
  if (help) words.push_back("--help");
  return words;
}

TrainCommand parse_train_command(int argc, char** argv) {
  TrainCommand command;
  std::string ranks;
  bool no_resume = false;
  CLI::App app("Trains a model from a config.", "tessera train");
  app.set_help_flag();
  app.allow_extras();
  app.add_option("CONFIG", command.file, "The config; docs/config_reference.md lists the keys");
  // CLI11 2.4 refuses a name with "=".
  app.add_option("OVERRIDES", command.overrides,
                 "Each KEY=VALUE replaces a value: optimizer.lr=3e-4, "
                 "optimizer.betas='[0.9, 0.99]', hooks.0.every=5");
  auto* nproc = app.add_option("-n,--nproc-per-node,--nproc_per_node", ranks,
                               "Starts so many ranks on this host");
  app.add_flag("--no-resume", no_resume, "Ignores the checkpoints in checkpoint.folder");
  auto* dump = app.add_option("--dump-config", command.dump,
                              "full or minimal: prints the config in effect, with all options or "
                              "only those that differ from the defaults, and exits");
  app.add_flag("--config-reference", command.reference,
               "Prints all keys of all components, and exits");
  app.add_flag("-h,--help", command.help, "Prints this text, and exits");
  for (auto* option : {nproc, dump}) option->type_name("")->expected(0, 1);
  app.parse(argc, argv);
  command.usage = app.help();
  for (const auto& word : app.remaining()) {
    if (word.rfind('-', 0) != 0) continue;
    throw UsageError(word + ": unknown option" +
                     did_you_mean(word, {"--dump-config", "--no-resume", "--config-reference",
                                         "--help", "--nproc-per-node"}) +
                     "\n" + command.usage);
  }
  if (nproc->count() > 0) command.ranks = launch::parse_nproc("-n", ranks);
  if (dump->count() > 0 && command.dump != "full" && command.dump != "minimal")
    throw UsageError("--dump-config: \"" + command.dump + "\"; expected full or minimal");
  if (no_resume) command.overrides.push_back("checkpoint.resume=false");
  return command;
}

int launch_ranks(const std::string& program, const TrainCommand& command) {
  launch::check_no_launcher(command.ranks);
  launch::LaunchOptions options;
  options.program = command.words();
  options.program.insert(options.program.begin(), program);
  options.nproc_per_node = command.ranks;
  options.command = "tessera train";
  return launch::run(options);
}

}  // namespace tessera::detail
