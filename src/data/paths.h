#pragma once

#include <string>
#include <vector>

namespace tessera {

/// The files that `paths` name, by ByteText's rule. Throws UsageError, `component: path: reason`;
/// of an empty list, `component: option: …`.
std::vector<std::string> expand_paths(const std::string& component, const std::string& option,
                                      const std::vector<std::string>& paths);

/// "a, b, c", for Tokens::source.
std::string listed(const std::vector<std::string>& paths);

}  // namespace tessera
