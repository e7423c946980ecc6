#pragma once

#include <string>
#include <vector>

namespace tessera::report {

/// `text` for HTML, with its special characters escaped.
std::string escaped(const std::string& text);
/// A number with about four digits: "0.0312", "12,340", "1.2e-05".
std::string shown(double value);
/// "12.3 MB", by powers of 1000.
std::string shown_bytes(double bytes);
/// "1 h 02 min", "3.4 s".
std::string shown_seconds(double seconds);

using Row = std::vector<std::string>;

/// A table of texts. The name of a column may begin with '#' for numbers at the right, '*' for long
/// text that may break, or '|' for bars, whose cells are widths in pixels.
std::string table(const Row& columns, const std::vector<Row>& rows);

}  // namespace tessera::report
