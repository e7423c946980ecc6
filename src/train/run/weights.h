#pragma once

#include <functional>
#include <string>

#include <torch/torch.h>

#include "tessera/safetensors.h"

namespace tessera::train {

/// Copies a tensor for every parameter and buffer of `module`, by name; UsageError, and nothing is
/// changed, listing what is missing or not expected and the first that has another shape. `file`
/// names the source; `entries`: what it has.
void load_weights(torch::nn::Module& module, const std::string& file,
                  const std::vector<SafetensorsEntry>& entries,
                  const std::function<at::Tensor(const std::string& name)>& load);
/// From a safetensors file.
void load_weights(torch::nn::Module& module, const std::string& path);

}  // namespace tessera::train
