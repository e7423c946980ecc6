#include "launch/supervise/signal_watch.h"

#include <atomic>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera::launch {
namespace {

std::atomic<int> pipe_of_handlers{-1};
static_assert(std::atomic<int>::is_always_lock_free, "used in a signal handler");

void on_signal(int number) {
  const int error = errno;
  const auto byte = static_cast<unsigned char>(number);
  // A full pipe holds thousands of signals already.
  (void)!write(pipe_of_handlers.load(), &byte, 1);
  errno = error;
}

}  // namespace

SignalWatch::SignalWatch() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0)
    throw UsageError(std::string("no pipe for signals: ") + std::strerror(errno));
  reader_ = Fd(ends[0]);
  writer_ = Fd(ends[1]);
  pipe_of_handlers.store(writer_.get());
  const BlockedSignals blocked;
  const auto set = [this](int number, void (*handler)(int)) {
    struct sigaction action {
    }, former;
    sigaction(number, nullptr, &former);
    if (number == SIGHUP && former.sa_handler == SIG_IGN) return;
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    sigfillset(&action.sa_mask);
    sigaction(number, &action, nullptr);
    former_.emplace_back(number, former);
  };
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGTSTP, SIGCHLD})
    set(number, on_signal);
  set(SIGPIPE, SIG_IGN);
}

SignalWatch::~SignalWatch() {
  for (const auto& [number, action] : former_) sigaction(number, &action, nullptr);
  pipe_of_handlers.store(-1);
}

std::vector<int> SignalWatch::take() {
  std::vector<int> numbers;
  unsigned char byte = 0;
  while (read(fd(), &byte, 1) == 1) numbers.push_back(byte);
  return numbers;
}

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? std::string("SIG") + name : "signal " + std::to_string(number);
}

}  // namespace tessera::launch
