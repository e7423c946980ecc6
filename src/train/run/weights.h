#pragma once

#include <functional>
#include <string>

#include <torch/torch.h>

#include "tessera/safetensors.h"

namespace tessera::train {

/// Copies a tensor into every parameter and buffer of `module`, by name. `file`: the source, for
/// messages; `entries`: its tensors. Throws UsageError, and changes nothing, when names are missing
/// or unexpected (it lists them) or a shape differs (it names the first).
void load_weights(torch::nn::Module& module, const std::string& file,
                  const std::vector<SafetensorsEntry>& entries,
                  const std::function<at::Tensor(const std::string& name)>& load);
/// The same from a safetensors file.
void load_weights(torch::nn::Module& module, const std::string& path);

}  // namespace tessera::train
