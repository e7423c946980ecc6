#include "launch/rendezvous_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string_view>

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/detail/folders.h"
#include "tessera/detail/proc.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "tessera-rdzv-";

/// The pids that this process sees: boot id of the host and pid namespace. The first pid namespace
/// has the same number on every host.
std::string pid_space() {
  std::string boot = detail::boot_id();
  std::erase(boot, '-');
  struct stat info;
  return boot + "." + (stat("/proc/self/ns/pid", &info) == 0 ? std::to_string(info.st_ino) : "0");
}

/// A lock on the folder, which its owner holds until it ends. Empty if it is not free. Where the
/// file system has no locks, the folder's name alone tells whether the owner has ended.
Fd lock_of(const std::string& folder) {
  Fd fd(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (fd && flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) fd.reset();
  return fd;
}

bool usable(const std::string& folder) {
  struct stat info;
  return folder.size() > 1 && folder[0] == '/' && stat(folder.c_str(), &info) == 0 &&
         S_ISDIR(info.st_mode) && info.st_uid == geteuid() &&
         access(folder.c_str(), W_OK | X_OK) == 0;
}

/// True if the owner in the name, tessera-rdzv-<pid space>-<pid>-<start>-<random>, has ended.
bool is_stale(const std::string& name) {
  std::istringstream parts(name.substr(kPrefix.size()));
  std::string space, pid, start, random;
  if (!std::getline(parts, space, '-') || !std::getline(parts, pid, '-') ||
      !std::getline(parts, start, '-') || !std::getline(parts, random))
    return false;
  const bool digits = !pid.empty() && pid.find_first_not_of("0123456789") == std::string::npos;
  return digits && space == pid_space() && detail::start_time(std::atoi(pid.c_str())) != start;
}

}  // namespace

std::string rendezvous_base() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime && usable(runtime)) return runtime;
  const char* temporary = std::getenv("TMPDIR");
  return temporary && *temporary ? temporary : "/tmp";
}

RendezvousFolder::RendezvousFolder() {
  path_ = rendezvous_base() + "/" + std::string(kPrefix) + pid_space() + "-" +
          std::to_string(getpid()) + "-" + detail::start_time(getpid()) + "-XXXXXX";
  if (!mkdtemp(path_.data())) {
    throw UsageError("rendezvous folder " + path_ + ": " + std::strerror(errno) +
                     ": expected a writable folder in XDG_RUNTIME_DIR, TMPDIR or /tmp");
  }
  lock_ = lock_of(path_);
}

RendezvousFolder::~RendezvousFolder() { remove_folder(path_); }

void remove_folder(const std::string& path) noexcept { detail::remove_all(path); }

void sweep_stale_folders(const std::string& base) noexcept {
  std::error_code error;
  for (fs::directory_iterator it(base, fs::directory_options::skip_permission_denied, error), end;
       !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.rfind(kPrefix, 0) != 0) continue;
    struct stat info;
    if (lstat(it->path().c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) continue;
    if (info.st_uid != geteuid() || (info.st_mode & 07777) != 0700) continue;
    if (!is_stale(name)) continue;
    const Fd lock = lock_of(it->path().string());
    if (lock) remove_folder(it->path().string());
  }
}

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool bound = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!bound)
    throw UsageError(std::string("no free loopback port: ") + std::strerror(error) +
                     ": give --master-port");
  return ntohs(address.sin_port);
}

}  // namespace tessera::launch
