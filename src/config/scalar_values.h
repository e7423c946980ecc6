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
/// The shortest text that reads as the same bits (0.1, 1e-08, -0, nan); whole numbers below 1e15
/// have no exponent.
std::string number_text(double value);

/// Values as nodes.
inline ConfigNode node_of(bool value) { return ConfigNode::scalar(value ? "true" : "false"); }
inline ConfigNode node_of(int64_t value) { return ConfigNode::scalar(std::to_string(value)); }
inline ConfigNode node_of(double value) { return ConfigNode::scalar(number_text(value)); }
inline ConfigNode node_of(const std::string& value) { return ConfigNode::scalar(value, true); }
template <class Value>
ConfigNode node_of(const std::vector<Value>& values) {
  ConfigNode node;
  node.kind = ConfigNode::Kind::Sequence;
  for (const auto& value : values) node.items.push_back(node_of(value));
  return node;
}
template <class Value>
ConfigNode node_of(const std::optional<Value>& value) {
  return value ? node_of(*value) : ConfigNode{};
}

/// Each returns no value when the node does not hold one. A quoted scalar is always a string. Whole
/// numbers may be written as 1000, 1e3 or 1000.0; 1_000 is not a number.
std::optional<int64_t> parse_integer(const ConfigNode& node);
std::optional<double> parse_number(const ConfigNode& node);
std::optional<bool> parse_bool(const ConfigNode& node);

}  // namespace tessera::config
