#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "tessera/detail/safetensors_entry.h"

// The safetensors format of Hugging Face, read and written to the letter: 8 bytes header size
// (little-endian), a JSON header of at most 100 MB, the data without holes. All of it is local to
// one rank: no collectives, safe to call on one rank alone. Tensors are on the CPU.

namespace tessera {

/// Names, values: both UTF-8. Written under `__metadata__`.
using SafetensorsMetadata = std::map<std::string, std::string>;

/// A file opened for reading. The whole header is checked in the constructor, against the size of
/// the file, before anything is allocated for tensors; the data is read only by `load` and
/// `load_slice`. Reading methods may be called from several threads.
class SafetensorsFile {
 public:
  /// Throws UsageError, naming file, tensor and offsets, when the file is missing or breaks the
  /// format anywhere: header size, JSON, duplicate keys, unknown dtypes, shapes that overflow or do
  /// not fit their bytes, overlaps, holes, offsets beyond the file, trailing bytes.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::string& path() const;
  /// Every tensor, in the order of the data.
  const std::vector<SafetensorsEntry>& entries() const;
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const;
  /// Throws UsageError with the nearest name when there is no such tensor.
  const SafetensorsEntry& info(const std::string& name) const;
  /// libtorch's name of a tensor's dtype. Throws UsageError for one that this libtorch lacks (F8_…
  /// and U16… on older ones).
  at::ScalarType scalar_type(const std::string& name) const;
  const SafetensorsMetadata& metadata() const;

  /// A new contiguous CPU tensor of the stored dtype and shape. Throws UsageError for a name that
  /// is not there or a dtype that this libtorch lacks (F8_… and U16… on older ones).
  at::Tensor load(const std::string& name) const;

  /// Reads `elem_count` elements from element `elem_begin` on (row-major order) into `out`, a
  /// contiguous CPU tensor of the stored dtype with exactly that many elements. Throws UsageError
  /// when the range or `out` does not fit.
  void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                  at::Tensor out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// What a writer must know of a tensor before its data.
struct SafetensorsSpec {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

/// Writes a file tensor by tensor, so that the memory needed beside the tensors is one tensor. The
/// data goes to a temporary file in the folder of `path`; `commit` syncs it, renames it to `path`
/// and syncs the folder: `path` is either the old file or the complete new one, whatever happens.
/// Destroyed without `commit`, or after an error, the temporary is removed. Tensors are laid out by
/// falling alignment of their dtype, then by name, as the reference implementation does. One thread
/// at a time.
class SafetensorsWriter {
 public:
  /// Throws UsageError for duplicate or reserved names, text that is not UTF-8, dtypes the format
  /// lacks, negative sizes; Error, with the path and the system's reason, when the temporary cannot
  /// be made.
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsSpec> tensors,
                    SafetensorsMetadata metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Any order, each name once; any device and strides. Throws UsageError when name, dtype or shape
  /// is not as declared; Error when the disk refuses, after which only destruction is left.
  void write(const std::string& name, const at::Tensor& tensor);

  /// Throws UsageError, naming them, when tensors were not written; Error when the disk refuses.
  void commit();

  /// The bytes in front of the data.
  const std::string& header() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A writer, fed at once.
void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const SafetensorsMetadata& metadata = {});

}  // namespace tessera
