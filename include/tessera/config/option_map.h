#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

// Options as plain values: the form in which a program, a parameter group or a checkpoint holds the
// options of an optimizer or of another component.

#pragma GCC visibility push(default)
namespace tessera {

/// The value of one option. A component that expects a number accepts an integer; one that expects
/// a whole number accepts 3.0; one that expects a list accepts a single value.
using OptionValue =
    std::variant<bool, int64_t, double, std::string, std::vector<double>, std::vector<std::string>>;
using OptionMap = std::map<std::string, OptionValue>;

/// For messages: `true`, `3`, `0.1`, `"text"`, `[0.9, 0.95]`.
std::string to_string(const OptionValue& value);

}  // namespace tessera
#pragma GCC visibility pop
