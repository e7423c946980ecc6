#pragma once

#include <cstdint>
#include <optional>

namespace tessera {

struct EarlyStopOptions {
  enum class Mode { less, greater };  ///< Which values are better.

  int64_t patience = 5;  ///< >= 1: observations in a row without improvement that end the training.
  double min_delta = 0;  ///< >= 0: an improvement is better than the best by more than this.
  Mode mode = Mode::less;
  bool check_finite =
      true;  ///< An infinity or NaN ends the training at once; off, it is no improvement.
};

/// Tells when a figure (a validation loss, an accuracy) no longer improves. (mmengine:
/// EarlyStoppingHook.) Local: give it the same values on all ranks. UsageError for impossible
/// options.
class EarlyStop {
 public:
  explicit EarlyStop(EarlyStopOptions options = {});

  /// Takes the next value; true when the training should end, and then on every later call. The
  /// first finite value is an improvement.
  bool observe(double value);

  /// For checkpoints. Loading: UsageError for a negative count.
  struct State {
    std::optional<double> best = {};
    int64_t waited = 0;  ///< Observations since the best.
    bool stopped = false;
  };
  const State& state() const { return state_; }
  void load_state(const State& state);

 private:
  bool improves(double value) const;

  EarlyStopOptions options_;
  State state_;
};

}  // namespace tessera
