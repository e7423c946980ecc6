#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config_node.h"
#include "tessera/config/option_reader.h"

// Scalars of a config as text and as values.

namespace tessera::config {

std::string joined(const std::vector<std::string>& words, const char* separator);

bool inside(double value, const Range& range);
/// "a number > 0 and < 1", where `noun` is "a number".
std::string expectation(const std::string& noun, const Range& range);
/// The shortest text that reads as the same number; whole numbers below 1e15 have no exponent.
std::string number_text(double value);
/// The shortest text that reads as the same bits (0.1, 1e-08, -0, nan).
std::string exact_text(double value);

/// Each returns no value when the node does not hold one. A quoted scalar is always a string. Whole
/// numbers may be written as 1000, 1e3 or 1000.0; 1_000 is not a number.
std::optional<int64_t> parse_integer(const ConfigNode& node);
std::optional<double> parse_number(const ConfigNode& node);
std::optional<bool> parse_bool(const ConfigNode& node);

}  // namespace tessera::config
