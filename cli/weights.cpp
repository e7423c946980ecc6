#include <cstdio>

#include "commands.h"
#include "sibling.h"
#include "tessera/error.h"

namespace tessera::cli {

int weights_command(int argc, char** argv) {
  try {
    std::vector<std::string> program{sibling_path("tessera-weights")};
    program.insert(program.end(), argv + 1, argv + argc);
    return replace_process(program);
  } catch (const UsageError& error) {
    std::fprintf(stderr, "tessera weights: %s\n", error.what());
    return kUsageExit;
  }
}

}  // namespace tessera::cli
