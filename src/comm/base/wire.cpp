#include "tessera/wire.h"

#include <fmt/format.h>

namespace tessera {

bool operator==(const WireOptions& a, const WireOptions& b) {
  return a.gradients == b.gradients && a.parameters == b.parameters;
}

std::string to_string(WireFormat format) {
  switch (format) {
    case WireFormat::bfloat16:
      return "bfloat16";
    case WireFormat::int8:
      return "int8";
    case WireFormat::float32:
      break;
  }
  return "float32";
}

std::optional<WireFormat> wire_format_of(const std::string& text) {
  for (const auto format : {WireFormat::float32, WireFormat::bfloat16, WireFormat::int8})
    if (to_string(format) == text) return format;
  return std::nullopt;
}

std::string to_string(const WireOptions& wire) {
  return fmt::format("gradients {}, parameters {}", to_string(wire.gradients),
                     to_string(wire.parameters));
}

}  // namespace tessera
