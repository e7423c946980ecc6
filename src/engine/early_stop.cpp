#include "tessera/step/early_stop.h"

#include <cmath>

#include "tessera/config/option_reader.h"

namespace tessera {

EarlyStop::EarlyStop(EarlyStopOptions options) : options_(options) {
  check_option("EarlyStop", "patience", options.patience, kAtLeastOne);
  check_option("EarlyStop", "min_delta", options.min_delta, kNotNegative);
}

bool EarlyStop::improves(double value) const {
  if (!std::isfinite(value)) return false;
  if (!state_.best) return true;
  return options_.mode == EarlyStopOptions::Mode::less ? value < *state_.best - options_.min_delta
                                                       : value > *state_.best + options_.min_delta;
}

bool EarlyStop::observe(double value) {
  if (state_.stopped) return true;
  if (improves(value)) {
    state_.best = value;
    state_.waited = 0;
    return false;
  }
  ++state_.waited;
  state_.stopped =
      state_.waited >= options_.patience || (options_.check_finite && !std::isfinite(value));
  return state_.stopped;
}

void EarlyStop::load_state(const State& state) {
  check_option("EarlyStop", "state.waited", state.waited, kNotNegative);
  state_ = state;
}

}  // namespace tessera
