#include "report/numbers.h"

#include <cmath>

#include <fmt/format.h>

namespace tessera::report {

std::string escaped(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    switch (letter) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        result += letter;
    }
  }
  return result;
}

std::string shown(double value) {
  const double size = std::fabs(value);
  if (!std::isfinite(value)) return "–";
  if (size >= 1000 && size < 1e7) {
    std::string digits = fmt::format("{:.0f}", value);
    const size_t least = value < 0 ? 4 : 3;
    for (size_t at = digits.size(); at > least;) digits.insert(at -= 3, ",");
    return digits;
  }
  return fmt::format("{:.4g}", value);
}

std::string shown_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  while (std::fabs(bytes) >= 1000 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.3g} {}", bytes, kUnits[unit]);
}

std::string shown_seconds(double seconds) {
  if (seconds < 60) return fmt::format("{:.3g} s", seconds);
  const auto minutes = static_cast<long long>(std::llround(seconds / 60));
  return minutes < 60 ? fmt::format("{} min", minutes)
                      : fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
}

}  // namespace tessera::report
