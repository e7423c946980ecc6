#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/data/dataset.h"

namespace tessera::train {

/// The batch with all its tensors, also the extra ones, on `device`.
inline Batch to_device(Batch batch, const at::Device& device) {
  if (device.is_cpu()) {
    return batch;
  }
  batch.inputs = batch.inputs.to(device);
  batch.targets = batch.targets.defined() ? batch.targets.to(device) : batch.targets;
  for (auto& [name, tensor] : batch.extra) {
    tensor = tensor.to(device);
  }
  return batch;
}

/// The numbers in tensors of one element. The host waits once for all that are on a device.
inline std::vector<double> read_figures(
    const std::vector<std::pair<std::string, at::Tensor>>& figures) {
  std::vector<at::Tensor> on_device;
  for (const auto& [name, value] : figures) {
    if (!value.is_cpu()) on_device.push_back(value.detach().to(at::kDouble).reshape({}));
  }
  at::Tensor read;
  if (!on_device.empty()) read = at::stack(on_device).cpu();
  std::vector<double> numbers;
  int64_t next = 0;
  for (const auto& [name, value] : figures)
    numbers.push_back(value.is_cpu() ? value.item<double>() : read[next++].item<double>());
  return numbers;
}

}  // namespace tessera::train
