#include "checkpoint/weights/part_writers.h"

#include <filesystem>

namespace tessera {

bool is_torch_path(const std::string& path) {
  return path.ends_with(".pt") || path.ends_with(".pth") || path.ends_with(".bin");
}

void PartWriters::begin(const WeightsPart& part) {
  std::vector<SafetensorsSpec> own;
  for (const size_t i : part.tensors) {
    own.push_back(tensors_[i]);
    places_[i] = writers_.size();
  }
  auto& writer = writers_.emplace_back();
  if (is_weights_folder(path_))
    writer.safetensors = std::make_unique<SafetensorsWriter>(
        (std::filesystem::path(path_) / part.file).string(), std::move(own), metadata_);
  else if (is_torch_path(path_))
    writer.torch = std::make_unique<TorchFileWriter>(path_, std::move(own));
  else writer.safetensors = std::make_unique<SafetensorsWriter>(path_, std::move(own), metadata_);
}

void PartWriters::write(size_t i, const at::Tensor& tensor) {
  auto& writer = writers_[places_[i]];
  if (writer.torch) writer.torch->write(tensors_[i].name, tensor);
  else writer.safetensors->write(tensors_[i].name, tensor);
}

void PartWriters::commit() {
  for (auto& writer : writers_)
    if (writer.torch) writer.torch->commit();
    else writer.safetensors->commit();
}

}  // namespace tessera
