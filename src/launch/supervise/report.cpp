#include "launch/supervise/report.h"

#include <algorithm>
#include <climits>

#include <signal.h>
#include <unistd.h>

#include "launch/supervise/signal_watch.h"

namespace tessera::launch {
namespace {

int order(const Exit& exit) {
  if (exit.consequence) return 2;
  return exit.signal != 0 && exit.signal != SIGABRT ? 0 : 1;
}

}  // namespace

size_t root_cause(const std::vector<Exit>& failures) {
  const auto first =
      std::min_element(failures.begin(), failures.end(),
                       [](const Exit& a, const Exit& b) { return order(a) < order(b); });
  return first - failures.begin();
}

bool mentions_broken_world(const std::deque<std::string>& last_lines) {
  return std::any_of(last_lines.begin(), last_lines.end(), [](const std::string& line) {
    return line.find("BrokenWorldError") != std::string::npos;
  });
}

std::string describe(const Exit& exit) {
  const std::string subject =
      "rank " + std::to_string(exit.rank) + " (pid " + std::to_string(exit.pid) + ") ";
  if (exit.signal == 0) return subject + "exited with code " + std::to_string(exit.code);
  return subject + "was killed by " + signal_name(exit.signal) +
         (exit.dumped ? " (core dumped)" : "");
}

std::string title(const Exit& exit) { return exit.consequence ? "first failure" : "root cause"; }

std::string count_ranks(size_t count) {
  return std::to_string(count) + (count == 1 ? " rank" : " ranks");
}

std::string host_name() {
  char name[HOST_NAME_MAX + 1] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

}  // namespace tessera::launch
