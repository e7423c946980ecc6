#pragma once

#include <cstdint>
#include <functional>

#include "tessera/process_group.h"
#include "tessera/step/agreement.h"

namespace tessera::store {

/// Tells which ranks have the numbered files of a checkpoint. This class is the plain case: all
/// ranks have all files, or only the files of this rank can be read. RemoteFiles derives from it.
class FileSource {
 public:
  explicit FileSource(ProcessGroup group) : group_(std::move(group)) {}
  virtual ~FileSource() = default;

  /// True if this rank has the file.
  virtual bool here(size_t file) const {
    (void)file;
    return true;
  }
  /// Reads a file that is not here.
  virtual void read(size_t file, void* to, size_t count, uint64_t offset) {
    (void)file, (void)to, (void)count, (void)offset;
  }
  /// Runs `body` on every rank; within it read() works for all files. Throws on every rank, as
  /// agree() does, if a rank's body threw. `body` must not call collectives. Collective.
  virtual void together(const std::function<void()>& body) { agree(group_, body); }

  /// The number of a rank among the ranks that have a file.
  struct Place {
    int number, count;
  };
  /// For `rank` of `ranks` ranks; it has the file.
  virtual Place place(size_t file, int rank, int ranks) const {
    (void)file;
    return {rank, ranks};
  }

 protected:
  ProcessGroup group_;
};

}  // namespace tessera::store
