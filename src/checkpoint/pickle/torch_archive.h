#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include <torch/types.h>

#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/pickle/pickle_values.h"
#include "checkpoint/pickle/torch_values.h"
#include "checkpoint/pickle/zip_directory.h"

namespace tessera::pickle {

/// A file of torch.save, or of C++'s torch::save(), opened for reading. The directory of a zip
/// archive is checked first. Records are read at their offsets, tensors without a checksum. Several
/// threads may read tensors at the same time.
class TorchArchive {
 public:
  /// Throws UsageError with path and reason if the file is not such an archive, was written by a
  /// big-endian machine, or is TorchScript with code. Logs contents that it leaves out.
  explicit TorchArchive(const std::string& path);
  ~TorchArchive();

  /// "torch file: PATH: ", the beginning of messages.
  const std::string& where() const;
  /// True if C++'s torch::save() has written it: the root is a module, not a dict of dicts.
  bool of_cpp() const;
  /// The pickle.
  const Values& values() const;

  /// Throws UsageError if the storage of the tensor is missing, compressed, or smaller than the
  /// pickle says.
  void check_storage(const TorchTensor& tensor) const;
  /// A new contiguous CPU tensor.
  at::Tensor load(const TorchTensor& tensor) const;
  /// Reads `count` elements from `begin` on, in row-major order, to `out`. Of a contiguous tensor
  /// it reads only these. Of a strided one it reads whole rows: the elements alone, if at least 256
  /// bytes of them lie side by side; else also the bytes between them.
  void load_slice(const TorchTensor& tensor, int64_t begin, int64_t count, at::Tensor& out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Throws UsageError with the tensor and its dtype if this libtorch does not have the dtype.
at::ScalarType scalar_type_of(const std::string& where, const TorchTensor& tensor);

}  // namespace tessera::pickle
