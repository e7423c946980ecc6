#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/optim/state_slice.h"

// The contents of `manifest.json`. docs/checkpoints.md lists the keys.

namespace tessera::store {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr int kManifestVersion = 1;

/// The layout of one saved slice. Its tensors are in the file under the names `tensor_name(state)`.
struct SliceRecord : ElementRange {
  std::vector<std::string> following;  // state tensors that are cut where the parameter is cut
  std::vector<std::string> whole;      // state tensors that are saved whole
  std::map<std::string, ScalarValue> scalars;

  bool stateless() const { return following.empty() && whole.empty() && scalars.empty(); }
  std::string tensor_name(const std::string& state) const;
};

struct FileRecord {
  std::string name;
  int rank = 0;      // the rank that wrote it
  std::string host;  // the name of its host; "" in older checkpoints
  uint64_t bytes = 0;
  /// Number of bytes before the data of a safetensors file; 0 for a text file.
  uint64_t header_bytes = 0;
  std::string digest;  ///< Digest of a safetensors header, or of a whole text file.
  std::map<std::string, std::string> tensors;  // name -> digest of its data
  /// Tensors with elements that are NaN or infinite: "weight: NaN in 3 of 8 elements". Masks are
  /// not listed.
  std::vector<std::string> nonfinite;
  std::string slice_set;  // the set that `slices` belong to; "" without slices
  std::vector<SliceRecord> slices;

  bool has_tensors() const { return header_bytes > 0; }
};

/// " (rank 3 on host b wrote it)"
std::string writer_text(const FileRecord& file);

struct Manifest {
  int64_t step = 0;
  int world_size = 1;
  std::vector<FileRecord> files;
  /// Another text for each save to several folders, so that parts of two saves do not fit together;
  /// "" for a save to one folder.
  std::string save_id = {};
};

/// "weights.safetensors: weight: NaN in 3 of 8 elements", one line for each tensor that is not
/// finite.
std::string unsound_text(const std::vector<FileRecord>& files);

/// Number of elements of a shape. Throws UsageError for negative sizes and on int64_t overflow.
int64_t count_elements(const std::vector<int64_t>& shape);

/// Throws UsageError unless `name` is a plain file name that is allowed in a checkpoint.
void check_file_name(const std::string& name);

/// Throws UsageError if the range is negative or not within its shape, or if its strides do not fit
/// its shape.
void check_range(const ElementRange& range);

/// Serializes records for other ranks. Throws UsageError for names that are not UTF-8.
std::string records_to_text(const std::vector<FileRecord>& records);
std::vector<FileRecord> records_from_text(const std::string& text);

/// The text of the manifest file. It ends with a digest of all bytes before it.
std::string manifest_to_text(const Manifest& manifest);

/// The version of a manifest of our format that is above kManifestVersion; 0 for any other text. A
/// newer version may have another digest, so the version is checked before the digest.
int newer_version(std::string_view text);

/// Throws UsageError for any changed, missing or additional byte and for another format or version.
/// The error text gives the reason but not the path.
Manifest manifest_from_text(std::string_view text);

}  // namespace tessera::store
