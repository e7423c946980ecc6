#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace tessera::train {

/// Returns and restores the state of this rank's default generators ("cpu", "cuda.0", …), as bytes.
/// Local.
std::vector<std::pair<std::string, at::Tensor>> random_state();
void set_random_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

}  // namespace tessera::train
