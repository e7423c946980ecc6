#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/optim/state_slice.h"

// What `manifest.json` says. docs/checkpoints.md lists the keys.

namespace tessera::store {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr int kManifestVersion = 1;

/// The layout of one slice of optimizer state: its tensors are in the file under `tensor_name`.
struct SliceRecord : ElementRange {
  std::vector<std::string> following;  // state tensors that are cut with the parameter
  std::vector<std::string> whole;      // those that are not
  std::map<std::string, ScalarValue> scalars;

  bool stateless() const { return following.empty() && whole.empty() && scalars.empty(); }
  std::string tensor_name(const std::string& state) const;
};

struct FileRecord {
  std::string name;
  int rank = 0;  // who wrote it
  uint64_t bytes = 0;
  /// Texts: 0, and `digest` is of all of it. Safetensors: the bytes in front of the data, of which
  /// `digest` then is.
  uint64_t header_bytes = 0;
  std::string digest;
  std::map<std::string, std::string> tensors;  // name -> digest of its data
  std::vector<SliceRecord> slices;

  bool has_tensors() const { return header_bytes > 0; }
};

struct Manifest {
  int64_t step = 0;
  int world_size = 1;
  std::vector<FileRecord> files;
};

/// Elements of a shape. Throws UsageError for negative sizes and for more than an int64_t counts.
int64_t count_elements(const std::vector<int64_t>& shape);

/// Throws UsageError unless `name` is a plain file name that a checkpoint's file may have.
void check_file_name(const std::string& name);

/// Throws UsageError for a negative run, or one beyond the shape.
void check_run(const std::vector<int64_t>& shape, int64_t begin, int64_t numel);

/// Records from one rank to another. Throws UsageError for names that are not UTF-8.
std::string records_to_text(const std::vector<FileRecord>& records);
std::vector<FileRecord> records_from_text(const std::string& text);

/// The file's text, which ends with a digest of all that stands before it.
std::string manifest_to_text(const Manifest& manifest);

/// Throws UsageError with what is wrong (not where): any changed, missing or additional byte,
/// another format or version.
Manifest manifest_from_text(std::string_view text);

}  // namespace tessera::store
