#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// "; did you mean --nnodes?" with the known name nearest to `name` by edit distance, or nothing when none is near.
std::string did_you_mean(const std::string& name, const std::vector<std::string>& known);

}  // namespace tessera::cli
