#pragma once

#include <cmath>

#include "tessera/step/lr_scheduler.h"

namespace tessera::engine {

/// Whole epochs done. `epoch` is a quotient of steps, which may fall a rounding short of the whole
/// number that it means.
inline double whole_epochs(double epoch) { return std::floor(epoch + 1e-9); }

/// t of a schedule: exact in a double.
inline double moment(const Progress& progress, ScheduleBy by) {
  return by == ScheduleBy::step ? static_cast<double>(progress.step) : whole_epochs(progress.epoch);
}

/// T of a schedule.
inline double total(const Progress& progress, ScheduleBy by) {
  return by == ScheduleBy::step ? static_cast<double>(progress.steps) : progress.epochs;
}

}  // namespace tessera::engine
