#include "comm/shm/shm_process.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <thread>

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/detail/classic.h"
#include "tessera/detail/proc.h"

namespace tessera::comm {
namespace {

struct Status {
  char state = 0;
  int64_t threads = 0;
  uint64_t start_time = 0;
};

std::optional<int64_t> number_in(const std::string& text) {
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr == text.data()) return std::nullopt;
  return value;
}

std::optional<Status> read_status(int32_t pid) {
  constexpr size_t kThreads = 17, kStartTime = 19;
  const auto fields = detail::process_fields(pid);
  if (fields.size() <= kStartTime) return std::nullopt;
  return Status{fields[0][0], number_in(fields[kThreads]).value_or(0),
                static_cast<uint64_t>(number_in(fields[kStartTime]).value_or(0))};
}

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The value in bytes of a line "Name:   123 kB" (unit 1024) or "name 123" (unit 1).
std::optional<int64_t> field_of(const char* path, const std::string& name, int64_t unit) {
  detail::Classic<std::ifstream> file(path);
  for (std::string key; file >> key;
       file.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    int64_t value = 0;
    if (key == name && file >> value) return value * unit;
  }
  return std::nullopt;
}

}  // namespace

ProcessIdentity this_process() {
  const int32_t pid = getpid();
  const auto status = read_status(pid);
  return {pid, status ? status->start_time : 0};
}

bool is_alive(const ProcessIdentity& process) {
  const auto status = read_status(process.pid);
  if (!status || status->start_time != process.start_time) return false;
  // A process whose main thread has ended is shown as a zombie although other threads still run.
  const bool ended = status->state == 'Z' || status->state == 'X';
  return !ended || status->threads > 1;
}

bool is_stopped(const ProcessIdentity& process) {
  const auto status = read_status(process.pid);
  if (!status || status->start_time != process.start_time) return false;
  return status->state == 'T' || status->state == 't';
}

std::string host_identity() {
  std::string identity = detail::boot_id();
  struct stat info {};
  if (stat("/proc/self/ns/pid", &info) == 0) identity += "/" + std::to_string(info.st_ino);
  return identity;
}

int64_t available_memory() {
  int64_t available = field_of("/proc/meminfo", "MemAvailable:", 1024)
                          .value_or(std::numeric_limits<int64_t>::max());
  const auto limit = number_in(first_line("/sys/fs/cgroup/memory.max"));
  const auto used = number_in(first_line("/sys/fs/cgroup/memory.current"));
  if (limit && used) {
    const int64_t reclaimable =
        field_of("/sys/fs/cgroup/memory.stat", "inactive_file", 1).value_or(0);
    available = std::min(available, *limit - *used + reclaimable);
  }
  return std::max<int64_t>(available, 0);
}

int usable_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace tessera::comm
