#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/hosts/file_source.h"
#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/store/manifest.h"
#include "checkpoint/store/slice_assembly.h"
#include "tessera/checkpoint_store.h"

namespace tessera {
namespace store {

/// The version of the checkpoint at `path` that is common to all ranks that have one; "" if there
/// is none or not on this rank. Collective.
std::string common_version(ProcessGroup group, const std::string& path);

/// As agree(). Throws CheckpointDamagedError on all ranks if every failed rank threw one.
void agree_undamaged(ProcessGroup group, const std::function<void()>& body);

/// The end of an error: "; older checkpoints in FOLDER: NAMES" of those beside the one at `path`.
std::string older_ones(const std::string& path);

}  // namespace store

struct Checkpoint::Impl : store::SliceReader {
  /// Local.
  explicit Impl(const std::string& folder);
  /// Collective: a file may be on the hosts of other ranks. In open_in_group.cpp.
  Impl(const std::string& folder, ProcessGroup group);

  /// The manifest's text; "" if it is missing and `or_none`.
  std::string manifest_text(bool or_none) const;
  void parse_manifest(const std::string& text);
  /// True if a file is here, with the right size. A missing file is an error unless `or_none`.
  bool check_file(const store::FileRecord& file, bool or_none) const;
  void index_slices();
  void find_holders(ProcessGroup group);

  /// Throws CheckpointDamagedError with file, tensor (may be empty), reason, and the names of the
  /// older checkpoints.
  [[noreturn]] void damaged(const std::string& file, const std::string& tensor,
                            const std::string& reason) const;
  /// The same for an errno, or -1 for anything but a regular file. Throws Error if the system could
  /// not read the file: it may be sound.
  [[noreturn]] void refuse(const std::string& file, int error) const;
  /// The same for a tensor whose data has changed; names its bytes in the file.
  [[noreturn]] void damaged_data(const store::FileRecord& file, const std::string& tensor) const;

  const store::FileRecord& record(const std::string& file) const;
  const store::FileRecord& tensor_record(const std::string& file) const;
  FileDescriptor open(const store::FileRecord& file) const;
  /// True if the file is on this rank's host.
  bool here(const store::FileRecord& file) const;
  /// Reads from here or from another host. Errors name the file.
  int64_t read(const store::FileRecord& file, void* to, size_t count, uint64_t offset) const;
  std::string read_text(const store::FileRecord& file, uint64_t bytes) const;
  void check_header(const store::FileRecord& file) const;
  const SafetensorsFile& tensors(const std::string& file) const;
  void compare(const std::string& file, const std::string& tensor, const at::Tensor& data) const;
  void verify_tensor(const store::FileRecord& file, const std::string& name,
                     const std::string& digest) const;
  std::string text(const std::string& file) const;
  void verify_share(int rank, int ranks) const;

  at::Tensor load(const std::string& file, const std::string& name) const override;
  void load_slice(const std::string& file, const std::string& name, int64_t begin, int64_t count,
                  at::Tensor out) const override;
  at::ScalarType dtype(const std::string& file, const std::string& name) const override;

  std::string path;
  store::Manifest manifest;
  std::map<std::string, const store::FileRecord*> records;
  /// By slice set and parameter.
  std::map<std::string, std::map<std::string, std::vector<store::SavedSlice>>> slices;
  mutable std::map<std::string, std::unique_ptr<SafetensorsFile>> opened;
  std::unique_ptr<store::FileSource> source;
};

}  // namespace tessera
