#pragma once

#include <cstdint>
#include <optional>

#pragma GCC visibility push(default)
namespace tessera {

struct EarlyStopOptions {
  enum class Mode { less, greater };  ///< The better values.

  /// Consecutive observations without an improvement after which training stops. >= 1
  int64_t patience = 5;
  /// A value improves on the best one only if it is better by more than this. >= 0
  double min_delta = 0;
  Mode mode = Mode::less;
  /// On: an infinity or NaN stops training at once. Off: it counts as no improvement.
  bool check_finite = true;
};

/// Detects that a figure (a validation loss, an accuracy) no longer improves. Follows mmengine's
/// EarlyStoppingHook. Local: pass the same values on all ranks. Throws UsageError for options out
/// of range.
class EarlyStop {
 public:
  explicit EarlyStop(EarlyStopOptions options = {});

  /// Takes the next value. Returns true if training should stop, and on every later call too. The
  /// first finite value is an improvement.
  bool observe(double value);

  /// The state that a checkpoint saves.
  struct State {
    std::optional<double> best = {};
    int64_t waited = 0;  ///< Observations since the best one.
    bool stopped = false;
  };
  const State& state() const { return state_; }
  /// Throws UsageError if `waited` is negative.
  void load_state(const State& state);

 private:
  bool improves(double value) const;

  EarlyStopOptions options_;
  State state_;
};

}  // namespace tessera
#pragma GCC visibility pop
