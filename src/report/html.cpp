#include "report/html.h"

#include <cmath>
#include <string_view>

#include <fmt/format.h>

namespace tessera::report {

std::string escaped(const std::string& text) {
  constexpr std::string_view kSpecial = "&<>\"'";
  constexpr const char* kEscapes[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  std::string result;
  for (const char letter : text) {
    const size_t at = kSpecial.find(letter);
    if (at == kSpecial.npos) result += letter;
    else result += kEscapes[at];
  }
  return result;
}

std::string shown(double value) {
  const double size = std::fabs(value);
  if (!std::isfinite(value)) return "–";
  if (size < 1000 || size >= 1e7) return fmt::format("{:.4g}", value);
  std::string digits = fmt::format("{:.0f}", value);
  const size_t least = value < 0 ? 4 : 3;
  for (size_t at = digits.size(); at > least;) digits.insert(at -= 3, ",");
  return digits;
}

std::string shown_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  for (; std::fabs(bytes) >= 1000 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1000;
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.3g} {}", bytes, kUnits[unit]);
}

std::string shown_seconds(double seconds) {
  if (seconds < 60) return fmt::format("{:.3g} s", seconds);
  const auto minutes = std::llround(seconds / 60);
  return minutes < 60 ? fmt::format("{} min", minutes)
                      : fmt::format("{} h {:02} min", minutes / 60, minutes % 60);
}

std::string table(const Row& columns, const std::vector<Row>& rows) {
  std::string head, body;
  Row classes;
  for (const auto& name : columns) {
    const bool marked = name.find_first_of("#*|") == 0;
    classes.push_back(name[0] == '#' ? " class=n" : name[0] == '*' ? " class=long" : "");
    head += fmt::format("<th{}>{}", classes.back(), escaped(name.substr(marked ? 1 : 0)));
  }
  for (const auto& row : rows) {
    body += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) {
      body += "<td" + classes[i] + ">";
      if (columns[i][0] != '|') body += escaped(row[i]);
      else body += fmt::format("<span class=bar style='width:{}px'></span>", row[i]);
    }
    body += "</tr>\n";
  }
  return "<div class=scroll><table><tr>" + head + "</tr>\n" + body + "</table></div>\n";
}

}  // namespace tessera::report
