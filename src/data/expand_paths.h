#pragma once

#include <string>
#include <vector>

namespace tessera {

/// The files that `paths` stand for, by the rule of ByteText::paths. Throws UsageError "component:
/// path: reason", for an empty list "component: option: reason".
std::vector<std::string> expand_paths(const std::string& component, const std::string& option,
                                      const std::vector<std::string>& paths);

/// "a, b, c", for Tokens::source().
std::string listed(const std::vector<std::string>& paths);

}  // namespace tessera
