#include "fuzz/training/subject.h"

#include <torch/nn/utils/clip_grad.h>

#include "tessera/tessera.h"

namespace tessera::fuzz {
namespace {

constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kOuter = "outer";  ///< The slices of LocalSgd.

}  // namespace

double Subject::clip_norm(double max_norm, double norm_type) {
  std::vector<at::Tensor> parameters;  // once each, where parameters() repeats shared ones
  for (const auto& item : named_parameters(*net_)) parameters.push_back(item.second);
  return torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
}

void Subject::clip_value() { torch::nn::utils::clip_grad_value_(net_->parameters(), 0.05); }

std::vector<at::Tensor> Subject::trained() {
  std::vector<at::Tensor> tensors;
  for (const auto& item : named_parameters(*net_)) tensors.push_back(item.second);
  return tensors;
}

std::vector<at::Tensor> Subject::gradients() {
  std::vector<at::Tensor> gradients;
  for (const auto& tensor : trained())
    if (tensor.grad().defined()) gradients.push_back(tensor.grad());
  return gradients;
}

void Subject::scale_gradients(double factor) {
  for (auto& gradient : gradients()) gradient.mul_(factor);
}

void Subject::replace_gradients(double factor) {
  for (const auto& tensor : trained()) {
    auto& gradient = tensor.mutable_grad();
    if (gradient.defined()) gradient = gradient * factor;
  }
}

void Subject::zero_grad(bool set_to_none) {
  for (auto& item : named_parameters(*net_)) {
    auto& gradient = item.second.mutable_grad();
    if (set_to_none || !gradient.defined()) gradient = at::Tensor();
    else gradient.zero_();
  }
}

OptimizerStateDict Subject::optimizer_state() {
  return state_dict(optimizer(), named_parameters(*net_));
}

void Subject::load(const ModuleStateDict& weights, const OptimizerStateDict& state) {
  load_weights(weights);
  load_state_dict(optimizer(), named_parameters(*net_), state);
}

std::unique_ptr<LocalSgd> Subject::make_local_sgd(const LocalSgdGroups& groups,
                                                  const LocalSgdOptions& options) {
  return std::make_unique<LocalSgd>(
      groups.outer, shards(), options, is_replicated() ? groups.inner : ProcessGroup(),
      [this] { publish(); }, [this] { prepare(); });
}

std::vector<ParameterShard> Subject::state_shards() {
  std::vector<ParameterShard> result;
  for (const auto& [name, parameter] : named_parameters(*net_))
    if (parameter.numel() > 0) result.push_back(whole_shard(name, parameter));
  return result;
}

void Subject::save(const std::string& folder, const ProcessGroup& group, LocalSgd* local_sgd) {
  CheckpointStore store(folder, group);
  CheckpointWriter writer(store, 0);
  const auto whole = weights();  // collective for some wrappers
  if (group.rank() == 0) writer.add_tensors(kWeightsFile, whole);
  if (saves_shards(group.rank())) writer.add_slices(state_slices());
  if (local_sgd) {
    const auto state = local_sgd->state_dict();
    std::vector<StateSlice> slices;
    int64_t at = 0;
    for (const auto& range : local_sgd->state_ranges()) {
      StateSlice slice;
      static_cast<ElementRange&>(slice) = range;
      for (const auto& [name, tensor] : state)
        if (tensor.dim() > 0) slice.state.tensors[name] = tensor.narrow(0, at, range.numel);
      at += range.numel;
      slices.push_back(std::move(slice));
    }
    writer.add_slices(slices, kOuter);
  }
  writer.commit();
}

void load_local_sgd(LocalSgd& local_sgd, const LocalSgd::State& like, const std::string& folder) {
  const Checkpoint checkpoint(latest_checkpoint(folder).value());
  const auto slices = checkpoint.load_slices(local_sgd.state_ranges(), kOuter);
  auto state = like;
  for (auto& [name, tensor] : state) {
    if (tensor.dim() == 0) continue;
    std::vector<at::Tensor> parts{at::empty({0}, tensor.options())};
    for (const auto& slice : slices)
      parts.push_back(slice.state.tensors.at(name).reshape({-1}).to(tensor.options()));
    tensor = at::cat(parts);
  }
  local_sgd.load_state_dict(state);
}

void Subject::load(const std::string& folder) {
  const Checkpoint checkpoint(latest_checkpoint(folder).value());
  ModuleStateDict weights;
  for (const auto& name : checkpoint.tensors(kWeightsFile).names())
    weights.emplace_back(name, checkpoint.load_tensor(kWeightsFile, name));
  load_weights(weights);
  std::vector<ElementRange> requests;
  for (const auto& shard : state_shards()) requests.push_back(shard);
  load_state_slices(checkpoint.load_slices(requests));
}

}  // namespace tessera::fuzz
