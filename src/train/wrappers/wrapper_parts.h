#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/optim/partition.h"
#include "tessera/train/model_wrapper.h"

namespace tessera::train {

/// A module and how its loss is computed: looks to DistributedDataParallel and
/// FullyShardedDataParallel like a pointer to a module whose forward is the loss.
struct LossModule {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const Batch&)> loss;

  torch::nn::Module& operator*() const { return *module; }
  const LossModule* operator->() const { return this; }
  at::Tensor forward(const Batch& batch) const { return loss(batch); }
};

int64_t bytes_of(const std::vector<at::Tensor>& tensors);
/// Of the tensors in `slices`.
int64_t bytes_of(const std::vector<StateSlice>& slices);

/// An optimizer over `groups`, whose options the registry makes.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const OptimizerPlan& plan,
    const std::vector<std::pair<std::vector<at::Tensor>, OptionMap>>& groups);

/// The parameter of that name on rank 0, undefined elsewhere.
at::Tensor whole_of(const torch::nn::Module& module, const std::string& name,
                    const ProcessGroup& group);

/// By their names in configurations.
const std::vector<std::pair<std::string, Partition>>& partitions();

void clamp_gradients(const std::vector<at::Tensor>& gradients, double largest);

}  // namespace tessera::train
