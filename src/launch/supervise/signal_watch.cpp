#include "launch/supervise/signal_watch.h"

#include <cstring>

#include <sys/signalfd.h>
#include <unistd.h>

namespace tessera::launch {

SignalWatch::SignalWatch() {
  sigset_t watched;
  sigemptyset(&watched);
  for (int number : {SIGINT, SIGTERM, SIGQUIT, SIGTSTP, SIGCHLD}) sigaddset(&watched, number);
  struct sigaction hangup;
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&watched, SIGHUP);
  sigprocmask(SIG_BLOCK, &watched, &former_mask_);
  fd_ = Fd(signalfd(-1, &watched, SFD_CLOEXEC | SFD_NONBLOCK));
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &former_pipe_);
}

SignalWatch::~SignalWatch() {
  take();
  sigaction(SIGPIPE, &former_pipe_, nullptr);
  sigprocmask(SIG_SETMASK, &former_mask_, nullptr);
}

std::vector<int> SignalWatch::take() {
  std::vector<int> numbers;
  signalfd_siginfo info;
  while (read(fd_.get(), &info, sizeof info) == sizeof info)
    numbers.push_back(static_cast<int>(info.ssi_signo));
  return numbers;
}

std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name ? std::string("SIG") + name : "signal " + std::to_string(number);
}

}  // namespace tessera::launch
