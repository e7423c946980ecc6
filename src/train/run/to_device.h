#pragma once

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

}  // namespace tessera::train
