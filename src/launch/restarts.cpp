#include "launch/restarts.h"

#include <algorithm>

namespace tessera::launch {

std::optional<std::chrono::milliseconds> Restarts::next(Clock::time_point now) {
  if (used_ == options_.max_restarts) return std::nullopt;
  while (!times_.empty() && now - times_.front() >= std::chrono::hours(1)) times_.pop_front();
  if (static_cast<int>(times_.size()) >= options_.restarts_per_hour) {
    refusal_ = "no restart: " + std::to_string(options_.restarts_per_hour) +
               " in the last hour (--restarts-per-hour)";
    return std::nullopt;
  }
  times_.push_back(now);
  ++used_;
  if (now - began_ >= std::chrono::minutes(10)) delay_ = options_.restart_delay;
  const auto wait = delay_;
  delay_ = std::min<std::chrono::milliseconds>(2 * delay_, std::chrono::minutes(1));
  return wait;
}

std::string Restarts::count() const {
  return std::to_string(used_) + " of " + std::to_string(options_.max_restarts);
}

std::string seconds_text(std::chrono::milliseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

}  // namespace tessera::launch
