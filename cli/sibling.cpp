#include "sibling.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <unistd.h>

#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::cli {

std::string sibling_path(const std::string& name) {
  const auto path = std::filesystem::path(launch::own_path()).parent_path() / name;
  if (access(path.c_str(), X_OK) != 0)
    throw UsageError(path.string() + ": " + std::strerror(errno) + ": expected the program");
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

}  // namespace tessera::cli
