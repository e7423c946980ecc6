#pragma once

#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/weights/weights.h"

namespace tessera {

/// The rules of WeightsOptions::key_map, compiled.
class KeyMap {
 public:
  /// Throws UsageError with the pattern if one is no regular expression.
  explicit KeyMap(const std::vector<NameRule>& rules);
  std::string operator()(std::string name) const;

 private:
  std::vector<std::pair<std::regex, std::string>> rules_;
};

}  // namespace tessera
