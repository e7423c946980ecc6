#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "tessera/detail/safetensors_entry.h"
#include "tessera/weights/tensor_source.h"

// Reads and writes the safetensors format of Hugging Face: 8 bytes of header size (little-endian),
// a JSON header of at most 100 MB, and the data without gaps. All functions are local to one rank:
// they make no collectives and may be called on one rank alone. Tensors are read to the CPU.

#pragma GCC visibility push(default)
namespace tessera {

/// Names and values, both UTF-8, under the key `__metadata__` of the header.
using SafetensorsMetadata = std::map<std::string, std::string>;

/// A file opened for reading. The constructor checks the whole header against the size of the file
/// before any memory is allocated for tensors.
class SafetensorsFile : public TensorSource {
 public:
  /// Throws UsageError with file, tensor and offsets if the file is missing or violates the format:
  /// header size, JSON, duplicate keys, unknown dtypes, shapes that overflow or do not match their
  /// number of bytes, overlapping tensors, gaps, offsets beyond the file, trailing bytes.
  explicit SafetensorsFile(const std::string& path);
  /// Reads `count` bytes at `offset` to `to`; returns less than `count` only at the end of the
  /// file. Throws the error of a failure.
  using ReadBytes = std::function<int64_t(void* to, size_t count, uint64_t offset)>;
  /// The same for a file of `bytes` bytes that is read by `read`, for example from another host.
  /// `path` names it in messages.
  SafetensorsFile(const std::string& path, uint64_t bytes, ReadBytes read);
  ~SafetensorsFile() override;
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::string& path() const override;
  /// In the order of the data.
  const std::vector<SafetensorsEntry>& entries() const override;
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const override;
  const SafetensorsEntry& info(const std::string& name) const override;
  at::ScalarType scalar_type(const std::string& name) const override;
  const SafetensorsMetadata& metadata() const;
  at::Tensor load(const std::string& name) const override;
  at::Tensor load_bytes(const std::string& name) const override;
  void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                  at::Tensor out) const override;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// The properties of a tensor that the header needs before its data is written.
struct SafetensorsSpec {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
};

/// Writes a file tensor by tensor, so that it takes memory for only one extra tensor. The data goes
/// to a temporary file in the folder of `path`. `commit` syncs it, renames it to `path` and syncs
/// the folder: after any failure `path` is either the old file or the complete new one. Destruction
/// without `commit`, or after an error, removes the temporary file. Tensors are ordered by
/// decreasing alignment of their dtype, then by name, as in the reference implementation. For one
/// thread at a time.
class SafetensorsWriter {
 public:
  /// Throws UsageError for duplicate or reserved names, text that is not UTF-8, dtypes that the
  /// format does not have, and negative sizes; Error with path and reason if the temporary file
  /// cannot be made.
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsSpec> tensors,
                    SafetensorsMetadata metadata = {});
  ~SafetensorsWriter();
  /// Throws the UsageError that the constructor would throw for these tensors. Makes no file.
  static void check(const std::string& path, std::vector<SafetensorsSpec> tensors);
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  /// Writes one tensor, on any device, with any strides; in any order, each name once. Throws
  /// UsageError if name, dtype or shape differ from the declaration; Error if writing fails, after
  /// which the writer can only be destroyed.
  void write(const std::string& name, const at::Tensor& tensor);

  /// Throws UsageError with the names of tensors that were not written; Error if writing fails.
  void commit();

  /// The bytes of the file before the data.
  const std::string& header() const;

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a whole file with a SafetensorsWriter.
void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const SafetensorsMetadata& metadata = {});

}  // namespace tessera
#pragma GCC visibility pop
