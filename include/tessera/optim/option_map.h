#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

// Options of an optimizer as plain values, the form in which a configuration or a checkpoint holds
// them.

namespace tessera {

/// Where a number is expected, an integer is accepted and converted; nothing else is converted.
using OptionValue = std::variant<bool, int64_t, double, std::string, std::vector<double>>;
using OptionMap = std::map<std::string, OptionValue>;

/// For messages: `true`, `3`, `0.1`, `"text"`, `[0.9, 0.95]`.
std::string to_string(const OptionValue& value);

}  // namespace tessera
