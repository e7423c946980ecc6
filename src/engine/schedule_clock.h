#pragma once

#include <cmath>

#include "tessera/step/lr_scheduler.h"

namespace tessera::engine {

/// Completed whole epochs. `epoch` is a quotient of numbers of steps, which rounding may make
/// slightly smaller than a whole number.
inline double whole_epochs(double epoch) { return std::floor(epoch + 1e-9); }

/// t of a schedule, which a double represents exactly.
inline double moment(const Progress& progress, ScheduleBy by) {
  return by == ScheduleBy::step ? static_cast<double>(progress.step) : whole_epochs(progress.epoch);
}

/// T of a schedule.
inline double total(const Progress& progress, ScheduleBy by) {
  return by == ScheduleBy::step ? static_cast<double>(progress.steps) : progress.epochs;
}

}  // namespace tessera::engine
