#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace tessera::train {

/// The state of this rank's default generators ("cpu", "cuda.0", …), as bytes; and back. Local.
std::vector<std::pair<std::string, at::Tensor>> random_state();
void set_random_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

}  // namespace tessera::train
