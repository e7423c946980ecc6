#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

namespace tessera::train {

/// This rank's default generators: the CPU's and the one of `device`. Local.
void seed_generators(uint64_t seed, at::Device device);

/// Returns and restores their states by name ("cpu", "cuda"), as bytes. A generator whose name is
/// not in `state` keeps its own. Local.
std::vector<std::pair<std::string, at::Tensor>> random_state(at::Device device);
void set_random_state(const std::vector<std::pair<std::string, at::Tensor>>& state,
                      at::Device device);

}  // namespace tessera::train
