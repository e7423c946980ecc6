#include "train/interruption.h"

#include <unistd.h>

#include <atomic>

#include "tessera/train.h"

namespace tessera {
namespace {

std::atomic<int> asked{0};
static_assert(std::atomic<int>::is_always_lock_free, "used in a signal handler");

void on_signal(int signal) {
  if (asked.load() != 0) {
    _exit(128 + signal);
  }
  request_stop(signal);
}

}  // namespace

void request_stop(int signal) noexcept { asked.store(signal); }

namespace train {

int stop_requested() noexcept { return asked.load(); }

void handle_signals() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace train
}  // namespace tessera
