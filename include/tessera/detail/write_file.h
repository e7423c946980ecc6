#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>

#pragma GCC visibility push(default)
namespace tessera {

/// Writes a whole text file. The text goes to a temporary file in the same folder, which is synced
/// and renamed to `path`; then the folder is synced. After any failure `path` is either the old
/// file or the complete new one. UsageError if the folder is missing or `path` is not a regular
/// file; Error if the system reports a failure. Both texts contain path and reason. Local.
void write_file(const std::string& path, const std::string& text);

/// Tries whether write_file() can work: writes, syncs, renames and removes a small file of another
/// name in the same folder. Throws as write_file() does. A file at `path` stays as it is. Local.
void check_writable(const std::string& path);

/// Writes text at the end of what `file`, which has nothing in its buffer, was given before. Goes
/// on after interrupts and short writes. False: errno has the reason. Local.
bool write_through(std::FILE* file, const std::string& text);

/// Reads a file, or its first `most` bytes. UsageError if it is no regular file or cannot be
/// opened, Error if reading fails. The texts begin with `component` and the path. Local.
std::string read_file(const std::string& component, const std::string& path,
                      uint64_t most = UINT64_MAX);

/// Makes a folder and its missing parents, and syncs the folders that they are in. A folder that
/// exists is no error. Local.
std::error_code make_folder(const std::string& folder);

}  // namespace tessera
#pragma GCC visibility pop
