#pragma once

// Runs many commands in one program, each in a forked process: libtorch takes a second of CPU time
// to start. Standard input has a line of JSON for each command, {"words", "folder", "out", "err"};
// standard output gets a line with its exit code, 128 + the signal for a death by a signal. The
// class Server of processes.py is the other side.

#include <cstdio>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::testing {

using Command = std::function<int(int argc, char** argv)>;

[[noreturn]] inline void run_forked(const nlohmann::json& request, const Command& command) {
  auto words = request.at("words").get<std::vector<std::string>>();
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const auto redirect = [](int to, const std::string& path, int flags) {
    if (::dup2(::open(path.c_str(), flags | O_CLOEXEC, 0600), to) != to) ::_exit(126);
  };
  if (::chdir(request.at("folder").get<std::string>().c_str()) != 0) ::_exit(126);
  redirect(0, "/dev/null", O_RDONLY);
  redirect(1, request.at("out"), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
  redirect(2, request.at("err"), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
  const int code = command(static_cast<int>(words.size()), argv.data());
  std::cout.flush();
  std::fflush(nullptr);
  ::_exit(code);
}

/// Returns the exit code of the program, at the end of standard input.
inline int serve(const Command& command) {
  for (std::string line; std::getline(std::cin, line);) {
    const auto request = nlohmann::json::parse(line);
    const pid_t pid = ::fork();
    if (pid == 0) run_forked(request, command);
    int status = 0;
    if (pid < 0 || ::waitpid(pid, &status, 0) != pid) return 1;
    std::printf("%d\n", WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace tessera::testing
