#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tessera/detail/safetensors_entry.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Named tensors on disk, opened for reading: SafetensorsFile, TorchFile, or Weights, which reads
/// any of them. Headers are read and checked when a source is opened; only `load` and `load_slice`
/// read data, at its offset. Several threads may call the members at the same time. Everything is
/// local. Tensors are read to the CPU.
class TensorSource {
 public:
  virtual ~TensorSource() = default;

  /// The file that is read, or the index of several files.
  virtual const std::string& path() const = 0;
  /// Every tensor. `end - begin` is its number of bytes.
  virtual const std::vector<SafetensorsEntry>& entries() const = 0;
  virtual bool contains(const std::string& name) const = 0;
  /// Throws UsageError with the most similar name if there is no such tensor.
  virtual const SafetensorsEntry& info(const std::string& name) const = 0;
  /// A tensor's dtype. Throws UsageError for a dtype that this libtorch does not have (such as F8_…
  /// and U16 on older versions).
  virtual at::ScalarType scalar_type(const std::string& name) const = 0;

  /// A new contiguous CPU tensor of the stored dtype and shape. Throws UsageError for an unknown
  /// name, and for a dtype that this libtorch does not have.
  virtual at::Tensor load(const std::string& name) const = 0;
  /// The same elements as their bytes, a uint8 tensor of one dimension. Needs no dtype of libtorch
  /// where the file has the elements as they are (safetensors). Throws UsageError as load() does.
  virtual at::Tensor load_bytes(const std::string& name) const;
  /// Reads the elements [elem_begin, elem_begin + elem_count), counted in row-major order, into
  /// `out`: a contiguous CPU tensor of the stored dtype with elem_count elements. Throws UsageError
  /// if the range or `out` does not match.
  virtual void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                          at::Tensor out) const = 0;

 protected:
  TensorSource() = default;
  TensorSource(const TensorSource&) = default;
  TensorSource(TensorSource&&) = default;
  TensorSource& operator=(const TensorSource&) = default;
  TensorSource& operator=(TensorSource&&) = default;

  /// Throws the errors of load_slice() for a tensor of `numel` elements of dtype `type`. `where`
  /// begins the message.
  static void check_slice(const std::string& where, int64_t numel, at::ScalarType type,
                          int64_t elem_begin, int64_t elem_count, const at::Tensor& out);
};

}  // namespace tessera
#pragma GCC visibility pop
