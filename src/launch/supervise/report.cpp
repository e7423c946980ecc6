#include "launch/supervise/report.h"

#include <algorithm>

#include <signal.h>
#include <unistd.h>

#include "launch/supervise/signal_watch.h"

namespace tessera::launch {

bool Exit::by_error() const { return failed() && (signal == 0 || signal == SIGABRT); }

bool Exit::consequence() const {
  if (!by_error()) return false;
  return report ? !report->names(rank) : broken_by_lines;
}

bool mentions_broken_world(const std::deque<std::string>& last_lines) {
  return std::any_of(last_lines.begin(), last_lines.end(), [](const std::string& line) {
    return line.find("BrokenWorldError") != std::string::npos;
  });
}

std::string name_of_rank(int rank, pid_t pid) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + ")";
}

std::string describe(const Exit& exit) {
  std::string text = name_of_rank(exit.rank, exit.pid);
  text += exit.signal == 0 ? " exited with code " + std::to_string(exit.code)
                           : " was killed by " + signal_name(exit.signal);
  if (exit.dumped) text += " (core dumped)";
  return text + (exit.memory.empty() ? "" : ", " + exit.memory);
}

std::string list_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string count_ranks(size_t count) {
  return std::to_string(count) + (count == 1 ? " rank" : " ranks");
}

}  // namespace tessera::launch
