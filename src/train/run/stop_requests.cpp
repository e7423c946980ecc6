#include "train/run/stop_requests.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <time.h>
#include <unistd.h>

#include "tessera/train.h"

namespace tessera {
namespace {

/// A second signal within this time counts as the same stop. A signal to all processes of a job
/// also goes to the launcher, which sends it on to the ranks.
constexpr int64_t kSameStop = 1'000'000'000;  // ns

std::atomic<int> requested{0};
std::atomic<int64_t> first_signal{0};  // monotonic time in ns; 0: no signal yet
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "used in a signal handler");

int64_t monotonic_ns() noexcept {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

void on_signal(int signal) {
  if (signal == SIGUSR1 || signal == SIGUSR2) return request_stop(signal);
  const int64_t now = monotonic_ns();
  int64_t before = 0;
  if (first_signal.compare_exchange_strong(before, now)) request_stop(signal);
  else if (now - before > kSameStop) _exit(128 + signal);
}

}  // namespace

void request_stop(int signal) noexcept { requested.store(signal); }

namespace train {

int stop_requested() noexcept { return requested.load(); }

void handle_signals() {
  first_signal.store(0);
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : kStopSignals) {
    struct sigaction former {};
    sigaction(signal, nullptr, &former);
    const bool ignored = signal == SIGHUP && former.sa_handler == SIG_IGN;
    if (!ignored) sigaction(signal, &action, nullptr);
  }
}

std::vector<double> StopRequests::flags() const {
  const int signal = stop_requested();
  std::vector<double> flags;
  for (const int each : kStopSignals) flags.push_back(signal == each ? 1 : 0);
  return flags;
}

void StopRequests::note(const std::vector<double>& ranks) {
  const auto asked = std::find_if(ranks.begin(), ranks.end(), [](double n) { return n > 0; });
  if (asked == ranks.end()) return;
  stop_ = true;
  here_ = here_ || stop_requested() != 0;
  signal_ = kStopSignals[static_cast<size_t>(asked - ranks.begin())];
}

}  // namespace train
}  // namespace tessera
