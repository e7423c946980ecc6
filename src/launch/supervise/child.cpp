#include "launch/supervise/child.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/supervise/signal_watch.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

bool is_folder(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

void default_signals() {
  for (int number = 1; number < SIGRTMIN; ++number) {
    if (number == SIGKILL || number == SIGSTOP) continue;
    struct sigaction action;
    // Under nohup the ranks ignore SIGHUP too.
    if (number == SIGHUP && sigaction(number, nullptr, &action) == 0 &&
        action.sa_handler == SIG_IGN)
      continue;
    signal(number, SIG_DFL);
  }
}

/// Makes descriptor `from` available as `to`. dup2() of a descriptor to itself would keep
/// FD_CLOEXEC. The launcher passes 0, 1 and 2 only for themselves, otherwise numbers above 2, so no
/// descriptor is overwritten before it is placed.
void place(int from, int to) {
  if (from == to) fcntl(to, F_SETFD, 0);
  else dup2(from, to);
}

UsageError refused(const std::string& resource, int rank, int error) {
  std::string text =
      "no " + resource + " for rank " + std::to_string(rank) + ": " + std::strerror(error);
  if (error == EAGAIN)
    text +=
        ": expected fewer ranks (-n), or a higher limit on processes ('ulimit -u', a container's "
        "pids.max)";
  return UsageError(text);
}

[[noreturn]] void become(const ChildSpec& spec, char* const* arguments, char* const* environment,
                         pid_t launcher, int report_fd, const sigset_t& mask) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(127);
  setpgid(0, 0);
  place(spec.in, 0);
  place(spec.out, 1);
  place(spec.err, 2);
  default_signals();
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  execve(spec.path.c_str(), arguments, environment);
  const int error = errno;
  (void)!write(report_fd, &error, sizeof error);
  _exit(127);
}

}  // namespace

Program exec_failure(const std::string& path, int error) {
  if (error == ENOEXEC) {
    return {
        "", 126,
        path +
            ": is not a program for this machine (a script needs a first line such as #!/bin/sh)"};
  }
  if (error == ENOENT)
    return {"", 127, path + ": the interpreter or loader it names was not found"};
  return {"", 126, path + ": cannot be executed: " + std::strerror(error)};
}

Program find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    if (is_folder(name)) return {"", 126, name + ": is a folder, expected a program"};
    if (access(name.c_str(), X_OK) == 0) return {name, 0, ""};
    if (errno == EACCES) return {"", 126, name + ": is not executable"};
    return {"", 127, name + ": " + std::strerror(errno)};
  }
  const char* search = std::getenv("PATH");
  const std::string path = search ? search : "/usr/local/bin:/usr/bin:/bin";
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0 && !is_folder(candidate)) return {candidate, 0, ""};
    begin = end + 1;
  }
  const bool here = access(("./" + name).c_str(), X_OK) == 0 && !is_folder(name);
  return {"", 127, name + ": not found in PATH" + (here ? "; did you mean ./" + name + "?" : "")};
}

Child::Child(const ChildSpec& spec) {
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) throw refused("pipe", spec.rank, errno);
  exec_fd_ = Fd(report[0]);
  Fd writer(report[1]);
  // Prepared here, because memory must not be allocated between fork and execve.
  const auto arguments = pointers(spec.arguments);
  const auto environment = pointers(spec.environment);
  const pid_t launcher = getpid();
  {
    const BlockedSignals blocked;
    pid_ = fork();
    if (pid_ == 0)
      become(spec, arguments.data(), environment.data(), launcher, writer.get(), blocked.former());
  }
  if (pid_ < 0) throw refused("process", spec.rank, errno);
  // Called in both processes, so that the group exists whichever of them runs first.
  setpgid(pid_, pid_);
  end_fd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  if (!end_fd_ && (errno == EMFILE || errno == ENFILE)) {
    const int error = errno;
    kill(pid_, SIGKILL);
    reap();
    throw refused("descriptor", spec.rank, error);
  }
}

int Child::wait_for_exec() {
  int error = 0;
  ssize_t got;
  do {
    got = read(exec_fd_.get(), &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  exec_fd_.reset();
  return got == sizeof error ? error : 0;
}

siginfo_t Child::peek(MemoryUse* use) const {
  siginfo_t info{};
  rusage usage{};
  // The C library's waitid() has no argument for the usage.
  syscall(SYS_waitid, P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT, &usage);
  if (use && info.si_pid != 0) {
    use->peak = static_cast<int64_t>(usage.ru_maxrss) << 10;
    rlimit addresses{};
    if (prlimit(pid_, RLIMIT_AS, nullptr, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY)
      use->addresses = static_cast<int64_t>(addresses.rlim_cur);
  }
  return info;
}

int Child::stop_signal() const {
  siginfo_t info{};
  const int got = waitid(P_PID, pid_, &info, WSTOPPED | WNOHANG | WNOWAIT);
  return got == 0 && info.si_pid != 0 ? info.si_status : 0;
}

void Child::signal_group(int number) const { kill(-pid_, number); }

void Child::reap() const {
  siginfo_t info{};
  while (waitid(P_PID, pid_, &info, WEXITED) != 0 && errno == EINTR) {
  }
}

}  // namespace tessera::launch
