#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/step/overlap.h"

namespace tessera::train {

/// The values of key `overlap`.
inline const std::vector<std::pair<std::string, Overlap>>& overlap_names() {
  static const std::vector<std::pair<std::string, Overlap>> names{
      {"none", Overlap::none},
      {"backward", Overlap::backward},
      {"background", Overlap::background}};
  return names;
}

}  // namespace tessera::train
