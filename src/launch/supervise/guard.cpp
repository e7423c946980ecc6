#include "launch/supervise/guard.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/rendezvous_folder.h"
#include "launch/supervise/signal_watch.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

struct Watched {
  std::vector<pid_t> groups;
  std::string folder;

  // A message is one letter and a value: g and a group, d and the folder, f to forget all.
  void take(const std::string& line) {
    if (line[0] == 'g') groups.push_back(std::atoi(line.c_str() + 1));
    if (line[0] == 'd') folder = line.substr(1);
    if (line[0] == 'f') *this = {};
  }
};

void detach(int pipe) {
  prctl(PR_SET_NAME, "tessera-guard");
  setsid();
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGPIPE})
    signal(number, SIG_IGN);
  signal(SIGCHLD, SIG_DFL);
  const int null = open("/dev/null", O_RDWR);
  for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
  // Closes the launcher's output: its readers must not wait for this process.
  dup2(pipe, 3);
  close_range(4, ~0U, 0);
}

[[noreturn]] void stand_guard(int pipe) {
  detach(pipe);
  Watched watched;
  std::string text;
  char buffer[512];
  for (ssize_t got; (got = read(3, buffer, sizeof buffer)) != 0;) {
    if (got < 0 && errno != EINTR) break;
    if (got < 0) continue;
    text.append(buffer, got);
    for (size_t end; (end = text.find('\0')) != std::string::npos; text.erase(0, end + 1))
      if (end > 0) watched.take(text.substr(0, end));
  }
  for (pid_t group : watched.groups) kill(-group, SIGKILL);
  if (!watched.folder.empty()) remove_folder(watched.folder);
  _exit(0);
}

}  // namespace

Guard::Guard() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    throw UsageError(std::string("no pipe for the guard: ") + std::strerror(errno));
  Fd reader(ends[0]);
  pipe_ = Fd(ends[1]);
  const BlockedSignals blocked;
  pid_ = fork();
  if (pid_ < 0) throw UsageError(std::string("no process for the guard: ") + std::strerror(errno));
  if (pid_ == 0) {
    pipe_.reset();
    stand_guard(reader.get());
  }
}

Guard::~Guard() {
  forget();
  pipe_.reset();
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guard::watch_group(pid_t group) { send("g" + std::to_string(group)); }
void Guard::watch_folder(const std::string& path) { send("d" + path); }
void Guard::forget() { send("f"); }

void Guard::send(const std::string& line) {
  // If the guard was killed, the launcher continues: the ranks' PR_SET_PDEATHSIG still works.
  (void)!write(pipe_.get(), line.c_str(), line.size() + 1);
}

}  // namespace tessera::launch
