#pragma once

#include <cstdint>
#include <string>

#include "checkpoint/io/file_descriptor.h"
#include "tessera/detail/own_process.h"

namespace tessera {

/// A file that appears under its name either complete or not at all. It is written as a temporary
/// file in the same folder, synced and renamed; then the folder is synced. Destruction without
/// `commit` removes the temporary file. The next AtomicFile in the folder removes the temporary
/// files of killed processes. A symbolic link at `path` is followed: its target is replaced.
class AtomicFile {
 public:
  /// Throws UsageError if the folder is missing or `path` is not a regular file, Error if the
  /// system reports a failure. Every message begins with `component`.
  AtomicFile(std::string component, const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Throws Error with path and reason if writing fails; the temporary file is then removed, and
  /// `open()` is false.
  void write_at(const void* from, size_t count, uint64_t offset);
  /// Fails in the same way. The old file is then unchanged, unless the text says that the new one
  /// is written: only the final sync of the folder failed.
  void commit();
  /// Does what a commit needs without touching `path`: writes a block, syncs the file, renames it
  /// to another temporary name, syncs the folder, removes the file. Fails as write_at() does.
  void rehearse();

  bool open() const { return static_cast<bool>(file_); }

 private:
  [[noreturn]] void fail(const std::string& action);
  void rename_to(const std::string& name);
  void discard() noexcept;

  std::string component_;
  std::string path_;    // as given by the caller, for messages
  std::string target_;  // with symbolic links resolved
  std::string folder_;
  std::string temporary_;  // empty once renamed or removed
  FileDescriptor file_;
  detail::OwnProcess process_;
};

}  // namespace tessera
