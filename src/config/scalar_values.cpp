#include "config/scalar_values.h"

#include <charconv>
#include <cmath>

namespace tessera::config {
namespace {

bool plain_scalar(const ConfigNode& node) {
  return node.kind == ConfigNode::Kind::Scalar && !node.quoted;
}

}  // namespace

std::string number_text(double value) {
  if (value == std::floor(value) && std::abs(value) < 1e15 && value != 0)
    return std::to_string(static_cast<int64_t>(value));
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, value);
  return {text, end.ptr};
}

std::string expectation(const std::string& noun, const Range& range) {
  std::string text = noun;
  const bool low = std::isfinite(range.min);
  if (low) text += (range.min_open ? " > " : " >= ") + number_text(range.min);
  if (std::isfinite(range.max)) {
    text +=
        std::string(low ? " and" : "") + (range.max_open ? " < " : " <= ") + number_text(range.max);
  }
  return text;
}

std::string joined(const std::vector<std::string>& words, const char* separator) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : separator) + word;
  return text;
}

bool inside(double value, const Range& range) {
  return (range.min_open ? value > range.min : value >= range.min) &&
         (range.max_open ? value < range.max : value <= range.max);
}

std::optional<double> parse_number(const ConfigNode& node) {
  if (!plain_scalar(node)) return std::nullopt;
  const char* begin = node.text.data();
  const char* end = begin + node.text.size();
  if (begin != end && *begin == '+') ++begin;
  double value = 0;
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error != std::errc() || stop != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::optional<int64_t> parse_integer(const ConfigNode& node) {
  if (!plain_scalar(node)) return std::nullopt;
  const char* end = node.text.data() + node.text.size();
  int64_t whole = 0;
  const auto [stop, error] = std::from_chars(node.text.data(), end, whole);
  if (error == std::errc() && stop == end) return whole;
  // A double does not hold every whole number beyond 2^53.
  const auto value = parse_number(node);
  if (!value || *value != std::floor(*value) || std::abs(*value) > 9007199254740992.0)
    return std::nullopt;
  return static_cast<int64_t>(*value);
}

std::optional<bool> parse_bool(const ConfigNode& node) {
  if (!plain_scalar(node)) return std::nullopt;
  for (const char* word : {"true", "True", "TRUE"})
    if (node.text == word) return true;
  for (const char* word : {"false", "False", "FALSE"})
    if (node.text == word) return false;
  return std::nullopt;
}

}  // namespace tessera::config
