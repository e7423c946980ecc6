#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/store/manifest.h"
#include "tessera/safetensors.h"

namespace tessera::store {

/// A safetensors file of a checkpoint, being written. Digests are of the tensors in memory, as they
/// are handed over, so that a disk that changes them is found out.
class TensorFile {
 public:
  /// Throws as SafetensorsWriter does, here and below.
  TensorFile(const std::string& folder, const std::string& name, std::vector<SafetensorsSpec> specs,
             const SafetensorsMetadata& metadata);

  void write(const std::string& name, const at::Tensor& tensor);
  /// Synced and named. The record lacks rank and slices.
  FileRecord finish();

 private:
  FileRecord record_;
  SafetensorsWriter writer_;
};

/// The same for a text.
FileRecord write_text_file(const std::string& folder, const std::string& name,
                           const std::string& text);

/// name, tensor as specs. Throws UsageError for undefined tensors.
std::vector<SafetensorsSpec> specs_of(
    const std::string& file, const std::vector<std::pair<std::string, at::Tensor>>& tensors);

}  // namespace tessera::store
