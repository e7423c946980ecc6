#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "train/config_tree.h"

namespace tessera::train {

/// Bounds of a number. The text in messages follows from them.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_open = false;
  bool max_open = false;
};
constexpr Range kPositive{0, std::numeric_limits<double>::infinity(), true, false};
constexpr Range kNotNegative{0, std::numeric_limits<double>::infinity(), false, false};
constexpr Range kProbability{0, 1, false, true};

bool inside(double value, const Range& range);
/// "a number > 0 and < 1", where `noun` is "a number".
std::string expectation(const std::string& noun, const Range& range);

/// Whole numbers may be written as 1000, 1_000 is not a number, 1e3 and 1000.0 are.
std::optional<int64_t> parse_integer(const ConfigNode& node);
std::optional<double> parse_number(const ConfigNode& node);
std::optional<bool> parse_bool(const ConfigNode& node);

}  // namespace tessera::train
