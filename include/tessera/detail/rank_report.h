#pragma once

#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "tessera/detail/classic.h"

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The report of a rank to its launcher about its end, so that the launcher can name the rank where
/// a failure began. A file with one report for each rank: TESSERA_REPORT holds its path.
struct RankReport {
  enum class Kind {
    agreed,  ///< All ranks ended with the same error. `ranks`: the ranks where it began.
    broken,  ///< BrokenWorldError. `ranks`: the ranks that it names.
    stop,    ///< Training ended because of a signal. `ranks`: this rank, if it got the signal.
  };

  Kind kind = Kind::agreed;
  int signal = 0;          ///< With Kind::stop.
  std::vector<int> ranks;  ///< Ranks of the world, ascending.
  std::string text;        ///< The error's message.

  bool names(int rank) const { return std::count(ranks.begin(), ranks.end(), rank) > 0; }

  /// The form in the file: a line "<kind> <signal> <ranks…>", then the message.
  std::string to_text() const {
    std::string result = std::to_string(static_cast<int>(kind)) + ' ' + std::to_string(signal);
    for (const int rank : ranks) result += ' ' + std::to_string(rank);
    return result + '\n' + text;
  }

  /// Returns nullopt if `bytes` are not the form of a report.
  static std::optional<RankReport> from_text(const std::string& bytes) {
    const size_t end = bytes.find('\n');
    if (end == std::string::npos) return std::nullopt;
    Classic<std::istringstream> line(bytes.substr(0, end));
    int kind = -1;
    RankReport result;
    if (!(line >> kind >> result.signal) || kind < 0 || kind > static_cast<int>(Kind::stop))
      return std::nullopt;
    result.kind = static_cast<Kind>(kind);
    for (int rank; line >> rank;) result.ranks.push_back(rank);
    if (!line.eof()) return std::nullopt;
    result.text = bytes.substr(end + 1);
    return result;
  }
};

}  // namespace tessera::detail
#pragma GCC visibility pop
