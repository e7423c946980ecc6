#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/save_weights.h"
#include "tessera/weights/torch_file.h"

namespace tessera {

/// The writers of one rank's files of weights; the path determines their kind.
class PartWriters {
 public:
  /// The arguments must outlive the object. `path`: as of save_weights().
  PartWriters(const std::string& path, const std::vector<SafetensorsSpec>& tensors,
              const SafetensorsMetadata& metadata)
      : path_(path), tensors_(tensors), metadata_(metadata), places_(tensors.size()) {}

  /// Begins the file of `part`.
  void begin(const WeightsPart& part);
  void write(size_t i, const at::Tensor& tensor);
  void commit();

 private:
  struct Writer {
    std::unique_ptr<SafetensorsWriter> safetensors;
    std::unique_ptr<TorchFileWriter> torch;
  };

  const std::string& path_;
  const std::vector<SafetensorsSpec>& tensors_;
  const SafetensorsMetadata& metadata_;
  std::vector<Writer> writers_;
  std::vector<size_t> places_;  // by tensor: its writer
};

}  // namespace tessera
