#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/hosts/file_source.h"

namespace tessera::store {

/// Reads files that only other ranks' hosts have, over the group.
///
/// A rank that needs bytes and the ranks that have them must communicate at the same time, so reads
/// happen within together(): a rank that reads a remote file begins a round. In a round every rank
/// states one request or none, and then serves the requests of the others. Ranks that have finished
/// their body stay in the rounds until all have. A round moves at most 16 MiB from each rank (64
/// KiB for each rank that asks, if that is more).
class RemoteFiles : public FileSource {
 public:
  /// Reads a local file; returns -1 with errno set, or less than `count` at the end of the file.
  using ReadLocal = std::function<int64_t(size_t file, void* to, size_t count, uint64_t offset)>;

  /// `holders`: for each file the ranks that have it, ascending, at least one.
  RemoteFiles(ProcessGroup group, std::vector<std::vector<int>> holders, ReadLocal read_local);

  bool here(size_t file) const override;
  void together(const std::function<void()>& body) override;
  /// Reads from the rank that has the file. Throws Error with that rank and the system's reason.
  /// Throws UsageError outside of together().
  void read(size_t file, void* to, size_t count, uint64_t offset) override;
  Place place(size_t file, int rank, int ranks) const override;

 private:
  struct Request {
    uint64_t file, offset, count;
  };
  bool round(const Request* mine, char* to);
  int server(size_t file, int reader) const;

  std::vector<std::vector<int>> holders_;
  ReadLocal read_local_;
  bool open_ = false;
};

}  // namespace tessera::store
