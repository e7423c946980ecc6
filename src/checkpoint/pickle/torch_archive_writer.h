#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <torch/types.h>

#include "checkpoint/pickle/allowed_names.h"

namespace tessera::pickle {

/// Writes an archive of torch.save with libtorch's writer into an AtomicFile.
class TorchArchiveWriter {
 public:
  /// Throws as AtomicFile does.
  TorchArchiveWriter(const std::string& path, const std::string& pickle);
  ~TorchArchiveWriter();

  /// Writes the storage `key`: the elements of `tensor` in row-major order. Throws Error with path
  /// and reason if writing fails; the file is then removed.
  void write(std::string_view key, const at::Tensor& tensor);
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The names of a dtype in pickles. Throws UsageError, which begins with `where`, for a dtype that
/// has none.
DtypeName dtype_name_of(const std::string& where, at::ScalarType type);

}  // namespace tessera::pickle
