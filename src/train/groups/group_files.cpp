#include "train/groups/group_files.h"

#include <fmt/format.h>

namespace tessera::train {
namespace {

constexpr const char* kParameter = "parameter";

std::string buffers_file_of(int group) {
  return fmt::format("group-{:05d}-buffers.safetensors", group);
}

}  // namespace

std::string slice_set_of(int group) {
  return group == 0 ? kOptimizerSlices : fmt::format("group-{:05d}", group);
}

std::string state_file_of(int group) {
  return group == 0 ? "state.json" : fmt::format("group-{:05d}.json", group);
}

void add_parameters(int group, const std::vector<ParameterShard>& shards,
                    std::vector<StateSlice>& slices) {
  if (group == 0) return;
  for (size_t i = 0; i < shards.size(); ++i)
    slices[i].state.tensors[kParameter] = shards[i].tensor.detach();
}

void load_parameters(int group, std::vector<StateSlice>& slices,
                     const std::vector<ParameterShard>& shards) {
  if (group == 0) return;
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < shards.size(); ++i) {
    auto& tensors = slices[i].state.tensors;
    const auto saved = tensors.find(kParameter);
    if (saved == tensors.end()) continue;  // was frozen, as in group 0
    const at::Tensor own = shards[i].tensor.detach();
    own.copy_(in_form_of(own, saved->second, slices[i]));
    tensors.erase(saved);
  }
}

void add_buffers(CheckpointWriter& writer, int group, const torch::nn::Module& module) {
  if (group == 0) return;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  for (const auto& buffer : module.named_buffers(true))
    if (buffer.value().defined()) buffers.emplace_back(buffer.key(), buffer.value());
  if (!buffers.empty()) writer.add_tensors(buffers_file_of(group), buffers);
}

void load_buffers(const Checkpoint& checkpoint, int group, torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const std::string file = buffers_file_of(group);
  if (!checkpoint.contains(file)) return;
  for (auto& buffer : module.named_buffers(true))
    if (buffer.value().defined()) buffer.value().copy_(checkpoint.load_tensor(file, buffer.key()));
}

std::vector<at::Tensor> take_from(std::vector<StateSlice>& slices, const std::string& name) {
  std::vector<at::Tensor> taken;
  for (auto& slice : slices) {
    const auto found = slice.state.tensors.find(name);
    const bool has = found != slice.state.tensors.end();
    taken.push_back(has ? found->second : at::Tensor());
    if (has) slice.state.tensors.erase(found);
  }
  return taken;
}

at::Tensor in_form_of(const at::Tensor& own, const at::Tensor& saved, const StateSlice& slice) {
  return slice.strides.empty() ? saved.reshape(own.sizes())
                               : saved.as_strided(own.sizes(), own.strides());
}

}  // namespace tessera::train
