#include "faults/failing_files.h"

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace {

// What can be done to an operation.
constexpr unsigned kAny = 1, kSpace = 2, kDescriptor = 4, kInterrupt = 8, kShort = 16;

struct How {
  const char* name;
  int error;  // 0: short; -1: kill
  unsigned needs;
};
constexpr How kHow[] = {{"EIO", EIO, kAny},
                        {"ENOSPC", ENOSPC, kSpace},
                        {"ESTALE", ESTALE, kAny},
                        {"EMFILE", EMFILE, kDescriptor},
                        {"EINTR", EINTR, kInterrupt},
                        {"short", 0, kShort},
                        {"kill", -1, kAny}};

struct Plan {
  char under[512] = "", only[32] = "";
  const How* how = nullptr;
  bool later = false;  // all later operations fail, too
  bool all_threads = true;
  long at = 0;
  std::atomic<long> count{0};
  int log = -1;
};
Plan plan;
bool lacks_exchange = false, lacks_flock = false, lacks_tmpfile = false;
thread_local bool this_thread = false;

void set(const char* under, const char* how, long at, bool all_threads) {
  plan.how = nullptr;
  std::snprintf(plan.under, sizeof plan.under, "%s", under);
  const char* colon = std::strchr(how, ':');
  std::snprintf(plan.only, sizeof plan.only, "%.*s", static_cast<int>(colon ? colon - how : 0),
                how);
  if (colon != nullptr) how = colon + 1;
  const size_t length = std::strlen(how);
  plan.later = length > 0 && how[length - 1] == '+';
  plan.at = at;
  plan.all_threads = all_threads;
  plan.count = 0;
  for (const auto& known : kHow)
    if (std::strncmp(known.name, how, length - plan.later) == 0 && !known.name[length - plan.later])
      plan.how = &known;
}

void lack(const char* what) {
  lacks_exchange = std::strstr(what, "exchange") != nullptr;
  lacks_flock = std::strstr(what, "flock") != nullptr;
  lacks_tmpfile = std::strstr(what, "tmpfile") != nullptr;
}

const char* of_environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : otherwise;
}

__attribute__((constructor)) void read_environment() {
  const char* under = of_environment("FAILING_FILES_UNDER", "");
  if (*under == 0) return;
  // A file system lacks the same for all ranks.
  lack(of_environment("FAILING_FILES_LACKS", ""));
  set(under, "", 0, false);
  const int rank = std::atoi(of_environment("FAILING_FILES_RANK", "-2"));
  if (rank != -2 && rank != std::atoi(of_environment("RANK", "-1"))) return;
  set(under, of_environment("FAILING_FILES_HOW", "EIO"),
      std::atol(of_environment("FAILING_FILES_AT", "0")), true);
  const char* log = of_environment("FAILING_FILES_LOG", "");
  if (*log != 0)
    plan.log = static_cast<int>(
        ::syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
}

bool watched(const char* path) {
  if (path[0] == '/') return std::strncmp(path, plan.under, std::strlen(plan.under)) == 0;
  char folder[1024];
  const long size = ::syscall(SYS_getcwd, folder, sizeof folder);
  return size > 0 && std::strncmp(folder, plan.under, std::strlen(plan.under)) == 0;
}

const char* path_of(int fd, char (&path)[1024]) {
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const long size = ::syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
  path[size > 0 ? size : 0] = 0;
  return path;
}

/// What to do to the operation: 1 nothing, 0 fewer bytes, -1 an error, with errno set.
int strike(const char* name, unsigned classes, const char* path) {
  if (plan.how == nullptr || (!plan.all_threads && !this_thread)) return 1;
  if ((plan.how->needs & (classes | kAny)) == 0 || !watched(path)) return 1;
  if (plan.only[0] != 0 && std::strcmp(plan.only, name) != 0) return 1;
  const int before = errno;
  const long number = ++plan.count;
  if (plan.log >= 0) {
    char line[1200];
    const int size = std::snprintf(line, sizeof line, "%ld %s %s\n", number, name, path);
    ::syscall(SYS_write, plan.log, line, size);
  }
  errno = before;
  if (plan.at == 0 || (plan.later ? number < plan.at : number != plan.at)) return 1;
  if (plan.how->error == 0) return 0;
  if (plan.how->error > 0) {
    errno = plan.how->error;
    return -1;
  }
  ::syscall(SYS_kill, ::getpid(), SIGKILL);
  for (;;) ::pause();
}

int strike(const char* name, unsigned classes, int fd) {
  if (plan.how == nullptr) return 1;
  const int before = errno;
  char path[1024];
  path_of(fd, path);
  errno = before;
  return path[0] == '/' ? strike(name, classes, path) : 1;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

#define NEXT(name) static const auto real = next<decltype(&::name)>(#name)

extern "C" {

void failing_files_begin(const char* under, const char* how, long at, bool all_threads) {
  this_thread = true;
  set(under, how, at, all_threads);
}
long failing_files_count() { return plan.count; }
void failing_files_lack(const char* what) { lack(what); }

// Opening

#define OPEN(name)                                                             \
  int name(const char* path, int flags, ...) {                                 \
    NEXT(name);                                                                \
    va_list more;                                                              \
    va_start(more, flags);                                                     \
    const bool makes = (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE;  \
    const auto mode = makes ? va_arg(more, mode_t) : 0;                        \
    va_end(more);                                                              \
    if (lacks_tmpfile && (flags & O_TMPFILE) == O_TMPFILE) {                   \
      errno = EOPNOTSUPP;                                                      \
      return -1;                                                               \
    }                                                                          \
    const unsigned classes = kDescriptor | kInterrupt | (makes ? kSpace : 0U); \
    return strike(#name, classes, path) < 0 ? -1 : real(path, flags, mode);    \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                          \
  int name(int folder, const char* path, int flags, ...) {                                    \
    NEXT(name);                                                                               \
    va_list more;                                                                             \
    va_start(more, flags);                                                                    \
    const auto mode = (flags & O_CREAT) ? va_arg(more, mode_t) : 0;                           \
    va_end(more);                                                                             \
    const unsigned classes = kDescriptor | kInterrupt;                                        \
    const bool own = folder == AT_FDCWD || path[0] == '/';                                    \
    if ((own ? strike(#name, classes, path) : strike(#name, classes, folder)) < 0) return -1; \
    return real(folder, path, flags, mode);                                                   \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                        \
  FILE* name(const char* path, const char* mode) {                         \
    NEXT(name);                                                            \
    const unsigned classes = kDescriptor | (mode[0] == 'r' ? 0U : kSpace); \
    return strike(#name, classes, path) < 0 ? nullptr : real(path, mode);  \
  }
FOPEN(fopen)
FOPEN(fopen64)

DIR* opendir(const char* path) {
  NEXT(opendir);
  return strike("opendir", kDescriptor, path) < 0 ? nullptr : real(path);
}

/// The descriptor is closed whatever the answer, as by Linux.
int close(int fd) {
  NEXT(close);
  const int struck = strike("close", kInterrupt, fd), error = errno;
  const int result = real(fd);
  if (struck >= 0) return result;
  errno = error;
  return -1;
}

// Bytes

#define TRANSFER(name, space, Bytes, last, ...)                                             \
  ssize_t name(int fd, Bytes bytes, size_t count last) {                                    \
    NEXT(name);                                                                             \
    const int struck = strike(#name, kInterrupt | (space) | (count > 1 ? kShort : 0U), fd); \
    if (struck < 0) return -1;                                                              \
    if (struck == 0) count = (count + 1) / 2;                                               \
    return real(fd, bytes, count __VA_OPT__(, ) __VA_ARGS__);                               \
  }
#define OFFSET , off_t offset
#define OFFSET64 , off64_t offset
TRANSFER(read, 0U, void*, )
TRANSFER(write, kSpace, const void*, )
TRANSFER(pread, 0U, void*, OFFSET, offset)
TRANSFER(pread64, 0U, void*, OFFSET64, offset)
TRANSFER(pwrite, kSpace, const void*, OFFSET, offset)
TRANSFER(pwrite64, kSpace, const void*, OFFSET64, offset)

ssize_t writev(int fd, const iovec* parts, int count) {
  NEXT(writev);
  return strike("writev", kSpace | kInterrupt, fd) < 0 ? -1 : real(fd, parts, count);
}

int fflush(FILE* file) {
  NEXT(fflush);
  return file != nullptr && strike("fflush", kSpace | kInterrupt, ::fileno(file)) < 0 ? EOF
                                                                                      : real(file);
}

// Other operations on descriptors

#define ON_FD(name, classes, parameters, ...)                       \
  int name parameters {                                             \
    NEXT(name);                                                     \
    return strike(#name, classes, fd) < 0 ? -1 : real(__VA_ARGS__); \
  }
ON_FD(fsync, kSpace | kInterrupt, (int fd), fd)
ON_FD(fdatasync, kSpace | kInterrupt, (int fd), fd)
ON_FD(ftruncate, kSpace | kInterrupt, (int fd, off_t size), fd, size)
ON_FD(ftruncate64, kSpace | kInterrupt, (int fd, off64_t size), fd, size)
ON_FD(fstat, 0, (int fd, struct stat* to), fd, to)
ON_FD(fstat64, 0, (int fd, struct stat64* to), fd, to)

int flock(int fd, int operation) noexcept {
  NEXT(flock);
  char path[1024];
  if (lacks_flock && watched(path_of(fd, path))) {
    errno = ENOSYS;
    return -1;
  }
  return strike("flock", kInterrupt, fd) < 0 ? -1 : real(fd, operation);
}

// Operations on names

#define ON_PATH(name, classes, parameters, ...)                       \
  int name parameters {                                               \
    NEXT(name);                                                       \
    return strike(#name, classes, path) < 0 ? -1 : real(__VA_ARGS__); \
  }
ON_PATH(mkdir, kSpace, (const char* path, mode_t mode), path, mode)
ON_PATH(rmdir, 0, (const char* path), path)
ON_PATH(unlink, kInterrupt, (const char* path), path)
ON_PATH(rename, kSpace | kInterrupt, (const char* path, const char* to), path, to)
ON_PATH(stat, 0, (const char* path, struct stat* to), path, to)
ON_PATH(stat64, 0, (const char* path, struct stat64* to), path, to)
ON_PATH(lstat, 0, (const char* path, struct stat* to), path, to)
ON_PATH(lstat64, 0, (const char* path, struct stat64* to), path, to)

int unlinkat(int folder, const char* path, int flags) noexcept {
  NEXT(unlinkat);
  const bool own = folder == AT_FDCWD || path[0] == '/';
  const int struck = own ? strike("unlinkat", 0, path) : strike("unlinkat", 0, folder);
  return struck < 0 ? -1 : real(folder, path, flags);
}

int renameat2(int from, const char* path, int folder, const char* to, unsigned flags) noexcept {
  NEXT(renameat2);
  if (lacks_exchange && (flags & RENAME_EXCHANGE)) {
    errno = EINVAL;
    return -1;
  }
  return strike("renameat2", kSpace | kInterrupt, path) < 0 ? -1
                                                            : real(from, path, folder, to, flags);
}
}
