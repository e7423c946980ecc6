#include "comm/rendezvous/announced_folder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/detail/folders.h"
#include "tessera/detail/proc.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

/// The folder in which the ranks of a user find each other, unless another user has taken its name.
fs::path usual_base() { return fs::path("/tmp") / fmt::format("tessera-{}", ::getuid()); }

bool is_private(const fs::path& folder) {
  struct stat info {};
  return ::lstat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode) &&
         info.st_uid == ::getuid() && (info.st_mode & 077) == 0;
}

/// The folders in which rank 0 may announce a folder: the usual folder, else the folders that
/// make_private_base() has made beside it.
std::vector<fs::path> private_bases() {
  const auto usual = usual_base();
  if (is_private(usual)) return {usual};
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(usual.parent_path(), ignored))
    if (entry.path().string().starts_with(usual.string() + "-") && is_private(entry.path()))
      found.push_back(entry.path());
  std::sort(found.begin(), found.end());
  return found;
}

fs::path make_private_base() {
  const auto usual = usual_base();
  ::mkdir(usual.c_str(), 0700);
  if (const auto bases = private_bases(); !bases.empty()) return bases.front();
  auto beside = usual.string() + "-XXXXXX";
  if (!::mkdtemp(beside.data()))
    throw UsageError(
        fmt::format("init_process_group: rank 0 cannot make the folder {}, through which the ranks "
                    "find each other: {}",
                    beside, std::strerror(errno)));
  return beside;
}

/// Takes the lock if it is free; `make`: creates a missing file. Returns the descriptor that holds
/// the lock, or -1. A file that was removed between opening and locking does not count. If the file
/// system has no locks, the caller with `make` continues without one.
int try_lock(const fs::path& lock, bool make) {
  const int fd = ::open(lock.c_str(), O_RDWR | (make ? O_CREAT : 0) | O_CLOEXEC, 0600);
  if (fd < 0 && make)
    throw UsageError(
        fmt::format("init_process_group: cannot open {}: {}", lock.string(), std::strerror(errno)));
  if (fd < 0) return -1;
  struct stat held {
  }, named{};
  const bool locked =
      ::flock(fd, LOCK_EX | LOCK_NB) == 0 || (make && errno != EWOULDBLOCK && errno != EINTR);
  if (locked && ::fstat(fd, &held) == 0 && ::stat(lock.c_str(), &named) == 0 &&
      held.st_ino == named.st_ino)
    return fd;
  ::close(fd);
  return -1;
}

/// Holds the lock of `key` until the process ends, so that a second run under the same key is
/// detected even if the files are removed.
void hold_key(const fs::path& lock, const std::string& key, Clock::time_point deadline) {
  while (try_lock(lock, true) < 0) {
    if (Clock::now() > deadline)
      throw UsageError(fmt::format(
          "init_process_group: rank 0: another run on this host already uses {}; choose another",
          key));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void remove_folders(const fs::path& base, const std::string& key) {
  std::error_code ignored;
  for (const auto& name : detail::names_in(base.string(), ignored))
    if (name.starts_with(key + ".d.")) detail::remove_all((base / name).string());
}

/// Removes the files of runs whose rank 0 has ended, that is, whose lock no process holds.
void sweep(const fs::path& base) {
  std::error_code ignored;
  std::vector<fs::path> locks;
  for (const auto& entry : fs::directory_iterator(base, ignored))
    if (entry.path().extension() == ".lock") locks.push_back(entry.path());
  for (const auto& lock : locks) {
    const int fd = try_lock(lock, false);
    if (fd < 0) continue;
    const auto key = lock.stem().string();
    remove_folders(base, key);
    fs::remove(base / (key + ".now"), ignored);
    fs::remove(base / (key + ".now.new"), ignored);
    fs::remove(lock, ignored);
    ::close(fd);
  }
}

/// The folder that rank 0 has announced in the file `pointer`; empty if there is none.
std::string take_seat(const fs::path& pointer, int rank) {
  std::ifstream file(pointer);
  std::string folder, pid, start;
  if (!std::getline(file, folder) || !std::getline(file, pid) || !std::getline(file, start) ||
      start != detail::start_time(std::atoi(pid.c_str())))
    return "";
  // Each rank can take its seat only once, so a rank of the next run cannot join a run that is
  // already complete.
  const auto seat = fmt::format("{}/seat.{}", folder, rank);
  const int fd = ::open(seat.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return "";
  ::close(fd);
  return folder;
}

}  // namespace

std::string announced_folder(const std::string& key, int rank, int size,
                             std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  if (rank == 0) {
    const auto base = make_private_base();
    const auto pointer = base / (key + ".now");
    hold_key(base / (key + ".lock"), key, deadline);
    remove_folders(base, key);
    sweep(base);
    auto name = (base / (key + ".d.XXXXXX")).string();
    if (!::mkdtemp(name.data()))
      throw UsageError(fmt::format("init_process_group: cannot make a folder in {}: {}",
                                   base.string(), std::strerror(errno)));
    const auto beside = pointer.string() + ".new";
    std::ofstream announcement(beside);
    announcement << fmt::format("{}\n{}\n{}\n", name, ::getpid(), detail::start_time(::getpid()));
    announcement.close();
    if (!announcement)
      throw UsageError(fmt::format("init_process_group: rank 0 cannot write {}: {}", beside,
                                   std::strerror(errno)));
    fs::rename(beside, pointer);
    return name;
  }
  while (Clock::now() < deadline) {
    for (const auto& base : private_bases())
      if (auto folder = take_seat(base / (key + ".now"), rank); !folder.empty()) return folder;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  throw BrokenWorldError(
      fmt::format("init_process_group: rank {} of {} waited {} ms for rank 0 ({})", rank, size,
                  timeout.count(), key),
      {0});
}

}  // namespace tessera::comm
