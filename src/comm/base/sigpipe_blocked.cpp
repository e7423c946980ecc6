#include "comm/base/sigpipe_blocked.h"

#include <ctime>

namespace tessera::comm {
namespace {

sigset_t only_sigpipe() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  return set;
}

}  // namespace

SigpipeBlocked::SigpipeBlocked() noexcept {
  const auto set = only_sigpipe();
  pthread_sigmask(SIG_BLOCK, &set, &former_);
}

SigpipeBlocked::~SigpipeBlocked() {
  if (sigismember(&former_, SIGPIPE)) return;
  // SIGPIPE was not blocked before, so a pending one was raised by writes in this scope.
  const auto set = only_sigpipe();
  const timespec at_once{};
  while (sigtimedwait(&set, nullptr, &at_once) == SIGPIPE) {
  }
  pthread_sigmask(SIG_SETMASK, &former_, nullptr);
}

}  // namespace tessera::comm
