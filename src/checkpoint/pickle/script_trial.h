#pragma once

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <new>
#include <string>

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/io/file_descriptor.h"
#include "tessera/error.h"

// Runs torch::jit::load in a trial process first. Damaged archives can end libtorch's unpickler by
// a signal, and the code of an archive runs while it is loaded and can go on without end.

namespace tessera::pickle {

struct TrialLimits {
  uint64_t cpu_seconds, wall_seconds;
  uint64_t memory_bytes;  // beyond those of this process
};

/// The limits for an archive of `bytes` bytes whose pickles have `pickle_bytes`.
inline TrialLimits trial_limits(uint64_t bytes, uint64_t pickle_bytes) {
  return {10 + bytes / 100'000'000, 60 + bytes / 10'000'000,
          (uint64_t{1} << 30) + 4 * bytes + 32 * pickle_bytes};
}

namespace trial {

constexpr char kReturned = 'r', kThrew = 't', kNoMemory = 'm', kNoReport = '\0';

/// The virtual memory of this process.
inline uint64_t memory_bytes() {
  uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// Only faults and the limit of CPU time end the trial: handlers of the program must not run in it.
inline void set_signals() {
  for (int number = 1; number < SIGRTMIN; ++number) ::signal(number, SIG_IGN);
  for (const int number : {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGXCPU})
    ::signal(number, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

/// The hard limit is larger, so that SIGXCPU comes before SIGKILL.
inline void set_limit(__rlimit_resource resource, uint64_t value) {
  const rlimit limit{value, value + 1};
  (void)::setrlimit(resource, &limit);
}

inline void silence() {
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3; ++fd) ::dup2(null, fd);
}

inline char outcome_of(const std::function<void()>& load) {
  try {
    load();
    return kReturned;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::exception& error) {
    return std::strstr(error.what(), "can't allocate memory") ? kNoMemory : kThrew;
  } catch (...) {
    return kThrew;
  }
}

[[noreturn]] inline void run(const std::function<void()>& load, const TrialLimits& limits,
                             pid_t parent, int report) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  set_signals();
  silence();
  at::set_num_threads(1);  // the thread pool of libtorch does not survive a fork
  set_limit(RLIMIT_CORE, 0);
  set_limit(RLIMIT_CPU, limits.cpu_seconds);
  set_limit(RLIMIT_AS, memory_bytes() + limits.memory_bytes);
  const char outcome = outcome_of(load);
  (void)!::write(report, &outcome, 1);
  ::_exit(0);
}

struct End {
  char outcome = kNoReport;
  int status = 0;  // as of waitpid(); 0 if a handler of the program has taken it
  bool timed_out = false;
};

inline int reap(pid_t pid) {
  int status = 0;
  pid_t got = -1;
  do got = ::waitpid(pid, &status, 0);
  while (got < 0 && errno == EINTR);
  return got == pid ? status : 0;
}

/// Waits for the report, for the end without one, or for the limit of time.
inline End await(pid_t pid, int report, uint64_t wall_seconds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(wall_seconds);
  End end;
  while (std::chrono::steady_clock::now() < until) {
    pollfd ready{report, POLLIN, 0};
    ::poll(&ready, 1, 20);
    const ssize_t got = ::read(report, &end.outcome, 1);
    if (got >= 0) {
      end.status = reap(pid);
      return end;
    }
    // A process that another thread has started may hold the pipe open.
    const pid_t ended = ::waitpid(pid, &end.status, WNOHANG);
    if (ended == pid || (ended < 0 && errno == ECHILD)) {
      (void)!::read(report, &end.outcome, 1);
      return end;
    }
  }
  end.timed_out = true;
  ::kill(pid, SIGKILL);
  reap(pid);
  return end;
}

}  // namespace trial

/// Runs `load` in a child process with only the calling thread. Returns if it returned there or
/// threw, which it will do again. Throws UsageError, which begins with `where`, if it was ended by
/// a signal or passed a limit. Other threads may run: if one holds a lock that `load` needs, the
/// limit of time is passed.
inline void try_in_child(const std::string& where, const std::function<void()>& load,
                         const TrialLimits& limits) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw Error(where + "no pipe for a trial process: " + errno_text(errno));
  const FileDescriptor reader(ends[0]);
  FileDescriptor writer(ends[1]);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) trial::run(load, limits, parent, writer.get());
  if (pid < 0) throw Error(where + "no trial process: " + errno_text(errno));
  writer.close();
  const trial::End end = trial::await(pid, reader.get(), limits.wall_seconds);
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(where + "torch::jit::load " + reason +
                     " in a trial process; expected a sound archive of torch.jit.save");
  };
  if (end.timed_out)
    refuse(fmt::format("did not end within {} s (it may wait for a lock of another thread)",
                       limits.wall_seconds));
  if (end.outcome == trial::kNoMemory)
    refuse(fmt::format("needed more than {} bytes of memory", limits.memory_bytes));
  if (end.outcome != trial::kNoReport) return;
  if (WIFSIGNALED(end.status) && WTERMSIG(end.status) == SIGXCPU)
    refuse(fmt::format("took more than {} s of CPU time", limits.cpu_seconds));
  const char* name = WIFSIGNALED(end.status) ? ::sigabbrev_np(WTERMSIG(end.status)) : nullptr;
  refuse(name ? fmt::format("was ended by SIG{}", name) : "ended without a result");
}

}  // namespace tessera::pickle
