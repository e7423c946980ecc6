#include "distributed_optimizer/thawed_gradients.h"

namespace tessera::distributed_optimizer {
namespace {

constexpr const char* kName = "DistributedOptimizer";

}  // namespace

void reduce_gradients(ProcessGroup& group, const std::vector<sharding::NamedTensor>& parameters,
                      double scale) {
  const at::NoGradGuard no_grad;
  std::vector<int> has;
  for (const auto& parameter : parameters) has.push_back(parameter.tensor.grad().defined());
  auto ranks = at::tensor(has, at::kInt).to(group.control_device());
  group.all_reduce(ranks, 1, "gradients of thawed parameters");
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    if (ranks[static_cast<int64_t>(i)].item<int>() == 0) continue;
    auto& grad = tensor.mutable_grad();
    if (!grad.defined()) grad = at::zeros_like(tensor);
    grad = sharding::dense_gradient(kName, name, grad, group.rank());
    group.all_reduce(grad, scale, name);
  }
}

void ThawedGradients::reduce(bool mean, int divisor) {
  for (auto& [group, parameters] : groups_) {
    std::vector<sharding::NamedTensor> thawed;
    std::vector<std::string> names;
    for (const auto& parameter : parameters) {
      if (!parameter.tensor.requires_grad()) continue;
      thawed.push_back(parameter);
      names.push_back(parameter.name);
    }
    if (thawed.empty()) continue;
    group.check_contract(std::string(kName) + " (a change of requires_grad)", names);
    reduce_gradients(group, thawed, mean ? 1.0 / (divisor > 0 ? divisor : group.size()) : 1);
    reduced_.insert(names.begin(), names.end());
  }
}

}  // namespace tessera::distributed_optimizer
