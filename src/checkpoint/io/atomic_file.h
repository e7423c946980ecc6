#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/io/file_descriptor.h"

namespace tessera {

/// A file that appears under its name complete, or not at all: written beside, synced, renamed,
/// folder synced. Destroyed without `commit`, it leaves nothing. A symbolic link at `path` is
/// followed: its target is replaced.
class AtomicFile {
 public:
  /// Throws UsageError when the folder is missing or `path` is something other than a file, Error
  /// when the system refuses. `component` begins every message.
  AtomicFile(std::string component, const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Throws Error with the path and the system's reason; the temporary is then gone, and `open()`
  /// false.
  void write_at(const void* from, size_t count, uint64_t offset);
  /// Likewise; the old file is untouched unless only the last sync, of the folder, failed.
  void commit();

  bool open() const { return static_cast<bool>(file_); }

 private:
  [[noreturn]] void fail(const std::string& action);
  void discard() noexcept;

  std::string component_;
  std::string path_;    // as the caller gave it, for messages
  std::string target_;  // with links resolved
  std::string folder_;
  std::string temporary_;  // empty once renamed or removed
  FileDescriptor file_;
};

}  // namespace tessera
