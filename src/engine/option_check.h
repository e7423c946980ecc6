#pragma once

#include <cmath>
#include <string>

#include "tessera/error.h"
#include "tessera/optim/option_map.h"

namespace tessera::engine {

/// Throws UsageError "<component>: option <name> = <value>, expected <expected>" unless `holds`.
inline void check_option(const std::string& component, const std::string& name,
                         const OptionValue& value, bool holds, const std::string& expected) {
  if (!holds) {
    throw UsageError(component + ": option " + name + " = " + to_string(value) + ", expected " +
                     expected);
  }
}

inline void check_positive(const std::string& component, const std::string& name, double value) {
  check_option(component, name, value, std::isfinite(value) && value > 0, "a number > 0");
}

inline void check_not_negative(const std::string& component, const std::string& name,
                               double value) {
  check_option(component, name, value, std::isfinite(value) && value >= 0, "a number >= 0");
}

inline void check_at_least(const std::string& component, const std::string& name, int64_t value,
                           int64_t least) {
  check_option(component, name, value, value >= least, "an integer >= " + std::to_string(least));
}

}  // namespace tessera::engine
