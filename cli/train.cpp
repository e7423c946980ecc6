#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <unistd.h>

#include "commands.h"
#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::cli {
namespace {

/// The trainer, which links libtorch; it is in the same folder as this program.
std::string trainer_path() {
  const auto path = std::filesystem::path(launch::own_path()).parent_path() / "tessera-train";
  if (access(path.c_str(), X_OK) != 0)
    throw UsageError(path.string() + ": " + std::strerror(errno) + ": expected the trainer");
  return path.string();
}

int replace_process(const std::vector<std::string>& program) {
  std::vector<char*> arguments;
  for (const std::string& argument : program)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  execv(program[0].c_str(), arguments.data());
  throw UsageError(program[0] + ": cannot be executed: " + std::strerror(errno));
}

/// True if a config is given. Without one the trainer only prints a text, so one process is started
/// instead of the ranks.
bool names_config(const std::vector<std::string>& words) {
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--dump-config") {
      ++i;
    } else if (words[i].rfind('-', 0) != 0) {
      return true;
    }
  }
  return false;
}

}  // namespace

int train_command(int argc, char** argv) {
  try {
    std::vector<std::string> arguments(argv + 1, argv + argc);
    const int nproc = launch::take_nproc(arguments);
    std::vector<std::string> program = {trainer_path()};
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
