#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>

#include "tessera/launch.h"

namespace tessera::launch {

/// The number of restarts and the wait before each one. The delay doubles from one restart to the
/// next, up to a minute, and begins again after an attempt that ran for ten minutes.
class Restarts {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Restarts(const LaunchOptions& options)
      : options_(options), delay_(options.restart_delay) {}

  /// An attempt begins.
  void begin(Clock::time_point now) { began_ = now; }
  /// The attempt has failed. Returns the time to wait before the next one, or nullopt if
  /// refusal() says why there is none.
  std::optional<std::chrono::milliseconds> next(Clock::time_point now);
  /// The reason against a restart; empty if all of --max-restarts are used up.
  const std::string& refusal() const { return refusal_; }
  /// "2 of 5": the last restart.
  std::string count() const;

 private:
  const LaunchOptions& options_;
  std::chrono::milliseconds delay_;
  std::deque<Clock::time_point> times_;
  Clock::time_point began_;
  int used_ = 0;
  std::string refusal_;
};

/// "1.5" for 1500 ms.
std::string seconds_text(std::chrono::milliseconds time);

}  // namespace tessera::launch
