#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/train/config_node.h"
#include "tessera/train/option_reader.h"

namespace tessera::config {

std::string joined(const std::vector<std::string>& words, const char* separator);

bool inside(double value, const Range& range);
/// "a number > 0 and < 1", where `noun` is "a number".
std::string expectation(const std::string& noun, const Range& range);
/// The shortest text that reads as the same number.
std::string number_text(double value);

/// Whole numbers may be written as 1000, 1_000 is not a number, 1e3 and 1000.0 are.
std::optional<int64_t> parse_integer(const ConfigNode& node);
std::optional<double> parse_number(const ConfigNode& node);
std::optional<bool> parse_bool(const ConfigNode& node);

}  // namespace tessera::config
