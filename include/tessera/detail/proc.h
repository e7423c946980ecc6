#pragma once

#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// /proc/<pid>/stat from its third field on: state, parent …; empty if there is no such process.
/// Reads the same values from the file of the main thread: qemu-user itself answers
/// /proc/<pid>/stat of the calling process, with a start time that its peers do not see.
inline std::vector<std::string> process_fields(int pid) {
  const auto id = std::to_string(pid);
  std::ifstream file("/proc/" + id + "/task/" + id + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  // The second field is the program's name in parentheses, which may itself contain parentheses.
  const size_t end = text.rfind(')');
  std::istringstream rest(end == std::string::npos ? "" : text.substr(end + 1));
  return {std::istream_iterator<std::string>(rest), {}};
}

/// Start time of the process in clock ticks since boot. Distinguishes it from later processes with
/// its pid. Empty if there is no such process or it is a zombie.
inline std::string start_time(int pid) {
  constexpr size_t kStartTime = 19;
  const auto fields = process_fields(pid);
  if (fields.size() <= kStartTime || fields[0] == "Z" || fields[0] == "X") return "";
  return fields[kStartTime];
}

/// Differs after each start of the host.
inline std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace tessera::detail
#pragma GCC visibility pop
