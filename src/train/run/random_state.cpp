#include "train/run/random_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include "tessera/error.h"

namespace tessera::train {
namespace {

at::Generator generator_of(const std::string& name) {
  if (name == "cpu") {
    return at::detail::getDefaultCPUGenerator();
  }
  const auto index = static_cast<c10::DeviceIndex>(std::stoi(name.substr(name.find('.') + 1)));
  return at::globalContext().defaultGenerator(at::Device(at::kCUDA, index));
}

std::vector<std::string> generators() {
  std::vector<std::string> names{"cpu"};
  if (torch::cuda::is_available()) {
    const auto devices = static_cast<int>(torch::cuda::device_count());
    for (int i = 0; i < devices; ++i) {
      names.push_back("cuda." + std::to_string(i));
    }
  }
  return names;
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> random_state() {
  std::vector<std::pair<std::string, at::Tensor>> state;
  for (const auto& name : generators()) {
    auto generator = generator_of(name);
    const std::lock_guard lock(generator.mutex());
    state.emplace_back(name, generator.get_state().clone());
  }
  return state;
}

void set_random_state(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  const auto here = generators();
  for (const auto& [name, tensor] : state) {
    if (std::find(here.begin(), here.end(), name) == here.end()) {
      continue;  // this host does not have that device
    }
    auto generator = generator_of(name);
    const std::lock_guard lock(generator.mutex());
    generator.set_state(tensor);
  }
}

}  // namespace tessera::train
