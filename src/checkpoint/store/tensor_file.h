#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/store/manifest.h"
#include "tessera/safetensors.h"

namespace tessera::store {

/// Writes a safetensors file of a checkpoint. Digests are computed from the tensors in memory, so
/// that data changed by the disk is detected.
class TensorFile {
 public:
  /// All functions throw as SafetensorsWriter's functions do.
  TensorFile(const std::string& folder, const std::string& name, std::vector<SafetensorsSpec> specs,
             const SafetensorsMetadata& metadata);

  void write(const std::string& name, const at::Tensor& tensor);
  /// Syncs the file and gives it its name. The returned record has no rank and no slices.
  FileRecord finish();

 private:
  FileRecord record_;
  SafetensorsWriter writer_;
};

/// Writes a text file; syncs and names it in the same way.
FileRecord write_text_file(const std::string& folder, const std::string& name,
                           const std::string& text);

}  // namespace tessera::store
