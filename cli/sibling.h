#pragma once

#include <string>
#include <vector>

namespace tessera::cli {

/// The path of a program that links libtorch; it is in the same folder as this program. Throws
/// UsageError if it is not there.
std::string sibling_path(const std::string& name);

/// Executes `program`, a path and its arguments, in place of this process. Throws UsageError if
/// that fails.
int replace_process(const std::vector<std::string>& program);

}  // namespace tessera::cli
