#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace tessera::train {

enum class Phase : int { starting, loading, training, hooks, evaluating, saving, finishing };

constexpr const char* name_of(Phase phase) {
  return std::array{
      "start-up", "loading the batch", "forward, backward and update", "a hook", "evaluation",
      "saving",   "the end of the run"}[static_cast<size_t>(phase)];
}

/// The present work of one rank, and the time of its steps. The rank's thread writes it, the
/// watchdog reads it.
class Heartbeat {
 public:
  /// Begins a phase, or makes progress in it. A step begins with Phase::loading.
  void enter(Phase phase, int64_t step) noexcept {
    if (phase == Phase::loading) begin_ = Clock::now();
    phase_ = phase;
    step_ = step;
    ++beats_;
  }
  /// The step is over.
  void end_step() noexcept {
    times_[static_cast<size_t>(steps_++) % kTimes] =
        std::chrono::duration<double>(Clock::now() - begin_).count();
    auto sorted = times_;
    const auto count = static_cast<std::ptrdiff_t>(std::min<int64_t>(steps_, kTimes));
    std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.begin() + count);
    median_ = sorted[static_cast<size_t>(count / 2)];
  }

  Phase phase() const noexcept { return phase_; }
  int64_t step() const noexcept { return step_; }
  /// Changes with every enter().
  uint64_t beats() const noexcept { return beats_; }
  /// Seconds, of the last 100 steps; negative before the end of the first one.
  double median() const noexcept { return median_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int64_t kTimes = 100;

  std::atomic<Phase> phase_{Phase::starting};
  std::atomic<int64_t> step_{0};
  std::atomic<uint64_t> beats_{0};
  std::atomic<double> median_{-1};
  Clock::time_point begin_ = Clock::now();
  std::array<double, kTimes> times_{};
  int64_t steps_ = 0;
};

}  // namespace tessera::train
