#include "launch/supervise/memory_watch.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include <signal.h>
#include <unistd.h>

#include "tessera/detail/classic.h"

namespace tessera::launch {
namespace {

std::string mebibytes(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

struct Group {
  std::string root, path, limit, events;
};

/// The control group in a line "number:controllers:path" of /proc/self/cgroup. With version 1 the
/// memory controller has a hierarchy of its own.
Group find_group(const std::string& cgroups, const std::string& own) {
  std::ifstream file(own);
  Group unified;
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path == "/") path.clear();
    if (controllers.find(",memory,") != std::string::npos)
      return {cgroups + "/memory", path, "memory.limit_in_bytes", "memory.oom_control"};
    if (controllers == ",,") unified = {cgroups, path, "memory.max", "memory.events"};
  }
  return unified;
}

/// The value of a line "oom_kill 3"; nullopt if there is none.
std::optional<int64_t> kills_in(const std::string& path) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    detail::Classic<std::istringstream> words(line);
    std::string name;
    int64_t value = 0;
    if (words >> name >> value && name == "oom_kill") return value;
  }
  return std::nullopt;
}

/// The error of an allocation, by malloc's callers or by libtorch on the CPU.
bool mentions_allocation(const std::deque<std::string>& lines) {
  return std::any_of(lines.begin(), lines.end(), [](const std::string& line) {
    for (const char* words : {"bad_alloc", "can't allocate memory", "Cannot allocate memory"})
      if (line.find(words) != std::string::npos) return true;
    return false;
  });
}

}  // namespace

MemoryWatch::MemoryWatch(const std::string& cgroups, const std::string& own,
                         const std::string& vmstat) {
  Group group = find_group(cgroups, own);
  // A container may see its own group as the topmost one although /proc shows the whole path.
  if (!exists(group.root + group.path)) group.path.clear();
  root_ = group.root;
  group_ = group.path;
  limit_ = group.limit;
  events_ = group.root + group.path + "/" + group.events;
  if (!kills_in(events_)) events_ = vmstat;
  before_ = counter();
}

int64_t MemoryWatch::counter() const { return kills_in(events_).value_or(0); }

int64_t MemoryWatch::kills() const { return counter() - before_; }

std::optional<int64_t> MemoryWatch::limit() const {
  // Version 1 shows a number near the largest one if there is no limit.
  constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max() / 2;
  int64_t smallest = kNoLimit;
  for (std::string path = group_;; path.erase(path.rfind('/'))) {
    detail::Classic<std::ifstream> file(root_ + path + "/" + limit_);
    int64_t value = 0;
    if (file >> value) smallest = std::min(smallest, value);
    if (path.empty() || path.rfind('/') == std::string::npos) break;
  }
  return smallest < kNoLimit ? std::optional(smallest) : std::nullopt;
}

std::string MemoryWatch::explain(const Exit& exit, const std::deque<std::string>& last_lines,
                                 const MemoryUse& use) const {
  if (!exit.failed() || exit.by_launcher || exit.consequence()) return "";
  const std::string peak = "its peak " + mebibytes(use.peak);
  if (exit.shell_code() == 128 + SIGKILL && kills() > 0) {
    const auto most = limit();
    return "by the kernel for memory (" +
           (most ? "cgroup limit " + mebibytes(*most) : std::string("no cgroup limit")) + "; " +
           peak + ")";
  }
  if (exit.by_error() && mentions_allocation(last_lines)) {
    return "out of memory (" +
           (use.addresses ? "RLIMIT_AS " + mebibytes(*use.addresses) : "no RLIMIT_AS") + "; " +
           peak + ")";
  }
  return "";
}

}  // namespace tessera::launch
