#pragma once

#include <string>

namespace tessera {

/// Writes a whole file: beside, synced, renamed, folder synced; `path` is either the old file or
/// the complete new one, whatever happens. Local. UsageError when the folder is missing or `path`
/// is something other than a file, Error when the system refuses; both name path and reason.
void write_file(const std::string& path, const std::string& text);

/// The same checks, and nothing is written.
void check_writable(const std::string& path);

}  // namespace tessera
