#include "train/watch/watchdog.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <system_error>

#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include "tessera/detail/running_collectives.h"
#include "tessera/error.h"
#include "train/watch/thread_stacks.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

/// Seconds in which the other ranks, whose watchdogs end at almost the same time, can report.
constexpr unsigned kGrace = 3;
/// A report that hangs ends after this many seconds.
constexpr unsigned kMostOfReport = 30;

/// One line to standard error, in one write. Allocates nothing.
template <class... Values>
void say_line(int rank, fmt::format_string<Values...> format, Values&&... values) noexcept {
  char line[512];
  char* end = fmt::format_to_n(line, sizeof line, "tessera train: rank {}: ", rank).out;
  const auto room = static_cast<size_t>(line + sizeof line - end) - 1;
  end = fmt::format_to_n(end, room, format, std::forward<Values>(values)...).out;
  *end++ = '\n';
  if (::write(STDERR_FILENO, line, static_cast<size_t>(end - line)) < 0) return;
}

}  // namespace

Watchdog::Watchdog(const WatchdogConfig& config, const Heartbeat& heartbeat,
                   const ProcessGroup& group, std::function<bool()> asked_to_stop)
    : config_(config),
      heartbeat_(heartbeat),
      rank_(group.rank()),
      peers_wait_(std::chrono::duration<double>(group.timeout()).count()),
      asked_to_stop_(std::move(asked_to_stop)),
      turn_(std::clamp(std::min({config.least, config.other, peers_wait_}) / 10, 0.01, 0.25)) {
  if (!config_.factor) return;
  prepare_thread_stacks();
  try {
    thread_ = std::thread([this] { watch(); });
  } catch (const std::system_error& error) {
    throw Error(std::string("train.watchdog: starting its thread failed: ") + error.what());
  }
}

Watchdog::~Watchdog() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Watchdog::wait_a_turn() noexcept {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, turn_, [this] { return over_; });
}

double Watchdog::limit() const noexcept {
  const double median = heartbeat_.median();
  const Phase phase = heartbeat_.phase();
  const bool in_step = phase == Phase::loading || phase == Phase::training;
  return in_step && median >= 0 ? std::max(config_.least, *config_.factor * median) : config_.other;
}

void Watchdog::watch() noexcept {
  uint64_t beats = heartbeat_.beats();
  double quiet = 0;
  bool reported = false;
  auto last = Clock::now();
  while (wait_a_turn()) {
    const auto now = Clock::now();
    // A longer turn means that this process did not run.
    quiet += std::min(std::chrono::duration<double>(now - last), 2 * turn_).count();
    last = now;
    if (beats != heartbeat_.beats()) {
      beats = heartbeat_.beats();
      quiet = 0;
    }
    const double most = limit();
    if (quiet > most) {
      ::signal(SIGALRM, [](int) { ::_exit(kNoProgress); });
      ::alarm(kMostOfReport);
      report(quiet, most);
      const timespec grace{kGrace, 0};
      ::nanosleep(&grace, nullptr);
      ::_exit(kNoProgress);
    }
    if (!reported && quiet > 0.9 * peers_wait_ && asked_to_stop_()) {
      reported = true;
      report(quiet, most);
    }
  }
}

void Watchdog::report_collectives() const noexcept {
  static std::array<detail::RunningCollective, 8> running;
  const int count = detail::running_collectives(running.data(), static_cast<int>(running.size()));
  if (count == 0)
    say_line(rank_, "it is in no collective; ranks that are in one wait for this rank");
  for (int i = 0; i < count; ++i) {
    const auto& each = running[static_cast<size_t>(i)];
    char late[256] = "";
    char* end = late;
    for (int k = 0; k < each.late_count; ++k) {
      const auto room = static_cast<size_t>(late + sizeof late - end) - 1;
      end = fmt::format_to_n(end, room, "{}{}", k == 0 ? "; it waits for rank " : ", ",
                             each.late[static_cast<size_t>(k)])
                .out;
    }
    *end = 0;
    say_line(rank_, "it is in {} #{} of {} elements{}{}{}, in a group of {} ranks{}{}",
             each.operation, each.number, each.numel, each.tag[0] != 0 ? " (" : "", each.tag.data(),
             each.tag[0] != 0 ? ")" : "", each.size,
             each.begun_by_all ? ", which all of them have begun" : "",
             static_cast<const char*>(late));
  }
}

void Watchdog::report(double quiet, double limit) const noexcept {
  say_line(rank_,
           "train.watchdog: no progress for {:.1f} s in step {}, {}; expected at most {:.1f} s",
           quiet, heartbeat_.step(), name_of(heartbeat_.phase()), limit);
  report_collectives();
  say_line(rank_, "the stacks of its threads (c++filt makes the names readable):");
  write_thread_stacks(STDERR_FILENO);
  say_line(rank_, "end of the stacks");
}

}  // namespace tessera::train
