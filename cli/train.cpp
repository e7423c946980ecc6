#include <cstdio>

#include "commands.h"
#include "sibling.h"
#include "tessera/detail/train_command.h"
#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::cli {

int train_command(int argc, char** argv) {
  try {
    const auto command = detail::parse_train_command(argc, argv);
    auto program = sibling_path("tessera-train");
    // Without a config the trainer only prints a text, so one process is started.
    if (command.ranks > 1 && !command.file.empty()) return detail::launch_ranks(program, command);
    if (command.ranks > 0) launch::check_no_launcher(command.ranks);
    auto words = command.words();
    words.insert(words.begin(), std::move(program));
    return replace_process(words);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "tessera train: %s\n", error.what());
    return kUsageExit;
  }
}

}  // namespace tessera::cli
