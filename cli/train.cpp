#include <cstdio>
#include <string>
#include <vector>

#include "commands.h"
#include "sibling.h"
#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::cli {
namespace {

/// True if a config is given. Without one the trainer only prints a text, so one process is started
/// instead of the ranks.
bool names_config(const std::vector<std::string>& words) {
  for (size_t i = 0; i < words.size(); ++i)
    if (words[i] == "--dump-config") ++i;
    else if (words[i].rfind('-', 0) != 0) return true;
  return false;
}

}  // namespace

int train_command(int argc, char** argv) {
  try {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    const int nproc = launch::take_nproc(arguments);
    std::vector<std::string> program = {sibling_path("tessera-train")};
    program.insert(program.end(), arguments.begin(), arguments.end());
    if (nproc > 0) launch::check_no_launcher(nproc);
    if (nproc <= 1 || !names_config(arguments)) return replace_process(program);
    launch::LaunchOptions options;
    options.program = std::move(program);
    options.nproc_per_node = nproc;
    options.command = "tessera train";
    return launch::run(options);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "tessera train: %s\n", error.what());
    return kUsageExit;
  }
}

}  // namespace tessera::cli
