#include "train/watch/thread_stacks.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include <execinfo.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// glibc's backtrace() and backtrace_symbols_fd() are used, and not a library, because they allocate
// nothing once libgcc is loaded: the report must work when memory is exhausted, and when a thread
// hangs while it holds malloc's lock.

namespace tessera::train {
namespace {

constexpr int kMostFrames = 100;
constexpr int kOwnFrames = 2;  // on_stack_signal() and the kernel's frame below it

struct Stack {
  void* frames[kMostFrames];
  int count = 0;

  bool operator==(const Stack& other) const {
    return count == other.count && std::equal(frames, frames + count, other.frames);
  }
};

int stack_signal = 0;  // 0: none is free
Stack written;         // by the handler
// The thread that is to write its stack; kBusy while it writes, kDone afterwards.
constexpr int kBusy = -1, kDone = 0;
std::atomic<int> wanted{kDone};
static_assert(std::atomic<int>::is_always_lock_free, "used in a signal handler");

int own_tid() noexcept { return static_cast<int>(::syscall(SYS_gettid)); }

void on_stack_signal(int) {
  const int error = errno;
  int expected = own_tid();
  if (wanted.compare_exchange_strong(expected, kBusy)) {
    written.count = ::backtrace(written.frames, kMostFrames);
    wanted = kDone;
  }
  errno = error;
}

bool wait_until_done(int milliseconds) noexcept {
  for (int i = 0; i < milliseconds && wanted != kDone; ++i) {
    const timespec pause{0, 1'000'000};
    ::nanosleep(&pause, nullptr);
  }
  return wanted == kDone;
}

/// Has thread `tid` write its stack to `written`.
bool read_stack(int tid) noexcept {
  if (stack_signal == 0 || wanted == kBusy) return false;
  wanted = tid;
  if (::syscall(SYS_tgkill, ::getpid(), tid, stack_signal) != 0) {
    wanted = kDone;
    return false;
  }
  if (wait_until_done(1000)) return true;
  int expected = tid;
  if (wanted.compare_exchange_strong(expected, kDone)) return false;
  return wait_until_done(2000);  // the thread is in backtrace()
}

void put(int fd, const char* text, size_t size) noexcept {
  if (::write(fd, text, size) < 0) return;  // nothing can report the failure
}

template <class... Values>
void put_line(int fd, fmt::format_string<Values...> format, Values&&... values) noexcept {
  char line[256];
  const auto end = fmt::format_to_n(line, sizeof line, format, std::forward<Values>(values)...);
  put(fd, line, std::min(end.size, sizeof line));
}

/// The name of a thread of this process, "?" if it is unknown.
void read_name(int tid, char (&name)[32]) noexcept {
  char path[64];
  const auto end = fmt::format_to_n(path, sizeof path - 1, "/proc/self/task/{}/comm", tid);
  *end.out = 0;
  std::strcpy(name, "?");
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  const ssize_t got = ::read(file, name, sizeof name - 1);
  ::close(file);
  name[got > 0 ? got - 1 : 0] = 0;  // without the newline
}

void write_stack(int fd, int tid, Stack& before) noexcept {
  char name[32];
  read_name(tid, name);
  if (!read_stack(tid)) {
    put_line(fd, "thread {} ({}): its stack cannot be read: it does not take the signal\n", tid,
             static_cast<const char*>(name));
    return;
  }
  if (written == before) {
    put_line(fd, "thread {} ({}): the same stack\n", tid, static_cast<const char*>(name));
    return;
  }
  before = written;
  put_line(fd, "thread {} ({}):\n", tid, static_cast<const char*>(name));
  const int skipped = std::min(kOwnFrames, written.count);
  ::backtrace_symbols_fd(written.frames + skipped, written.count - skipped, fd);
}

/// An entry as getdents64() writes it.
struct FolderEntry {
  uint64_t inode;
  int64_t offset;
  uint16_t size;
  uint8_t type;
  char name[1];
};

/// Calls visit(tid) for every other thread, or for the main thread where /proc is missing.
/// opendir() would allocate.
template <class Visit>
void for_each_thread(const Visit& visit) noexcept {
  const int folder = ::open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return visit(static_cast<int>(::getpid()));
  alignas(FolderEntry) char buffer[4096];
  long got = 0;
  while ((got = ::syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0) {
    for (long at = 0; at < got;) {
      const auto* entry = reinterpret_cast<const FolderEntry*>(buffer + at);
      const int tid = std::atoi(entry->name);
      if (tid > 0 && tid != own_tid()) visit(tid);
      at += entry->size;
    }
  }
  ::close(folder);
}

}  // namespace

void prepare_thread_stacks() {
  static std::once_flag once;
  std::call_once(once, [] {
    ::backtrace(written.frames, 1);  // loads libgcc, which allocates
    for (int signal = SIGRTMAX; signal >= SIGRTMIN && stack_signal == 0; --signal) {
      struct sigaction action {};
      ::sigaction(signal, nullptr, &action);
      if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) continue;
      action = {};
      action.sa_handler = on_stack_signal;
      action.sa_flags = SA_RESTART;
      ::sigfillset(&action.sa_mask);
      if (::sigaction(signal, &action, nullptr) == 0) stack_signal = signal;
    }
  });
}

void write_thread_stacks(int fd) noexcept {
  static Stack before;
  before.count = 0;
  for_each_thread([fd](int tid) { write_stack(fd, tid, before); });
}

}  // namespace tessera::train
