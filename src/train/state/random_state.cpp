#include "train/state/random_state.h"

#include <c10/core/DeviceType.h>

#include "tessera/train/devices.h"

namespace tessera::train {
namespace {

/// By name. Only one entry if the device has no generator of its own.
std::vector<std::pair<std::string, at::Generator>> generators(at::Device device) {
  std::vector<std::pair<std::string, at::Generator>> all{{"cpu", generator_of(at::kCPU)}};
  auto own = generator_of(device);
  if (own != all.front().second)
    all.emplace_back(c10::DeviceTypeName(device.type(), true), std::move(own));
  return all;
}

}  // namespace

void seed_generators(uint64_t seed, at::Device device) {
  torch::manual_seed(seed);
  for (auto& [name, generator] : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

std::vector<std::pair<std::string, at::Tensor>> random_state(at::Device device) {
  std::vector<std::pair<std::string, at::Tensor>> state;
  for (auto& [name, generator] : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    state.emplace_back(name, generator.get_state().clone());
  }
  return state;
}

void set_random_state(const std::vector<std::pair<std::string, at::Tensor>>& state,
                      at::Device device) {
  for (auto& [name, generator] : generators(device)) {
    for (const auto& [saved, tensor] : state) {
      if (saved != name) continue;
      const std::lock_guard lock(generator.mutex());
      generator.set_state(tensor);
    }
  }
}

}  // namespace tessera::train
