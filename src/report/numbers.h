#pragma once

#include <string>

namespace tessera::report {

/// `text` for HTML, with its special characters escaped.
std::string escaped(const std::string& text);
/// A number with about four digits: "0.0312", "12,340", "1.2e-05".
std::string shown(double value);
/// "12.3 MB", by powers of 1000.
std::string shown_bytes(double bytes);
/// "1 h 02 min", "3.4 s".
std::string shown_seconds(double seconds);

}  // namespace tessera::report
