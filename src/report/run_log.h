#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::report {

using Points = std::vector<std::pair<double, double>>;  ///< (x, y); y may be NaN

/// The records of one run, as docs/report.md describes them.
struct RunLog {
  std::string name;                      ///< the path as it was given
  std::map<std::string, Points> series;  ///< each figure of the steps, over the step
  std::vector<nlohmann::ordered_json> events;
  int64_t unreadable = 0;  ///< lines that are no JSON object

  /// The events of this kind, in the order of the file.
  std::vector<const nlohmann::ordered_json*> events_of(const std::string& kind) const;
  /// The last event of this kind; null: there is none.
  const nlohmann::ordered_json* last(const std::string& kind) const;
};

/// Reads the logs at `path`, a file or a folder. Throws UsageError.
std::vector<RunLog> read_runs(const std::string& path);

/// A member of `json` as a number; `otherwise` if it is missing or of another type.
double number(const nlohmann::ordered_json& json, const std::string& key, double otherwise = 0);
std::string text(const nlohmann::ordered_json& json, const std::string& key);

}  // namespace tessera::report
