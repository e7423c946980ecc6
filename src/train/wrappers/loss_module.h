#pragma once

#include <functional>
#include <memory>

#include <torch/nn/module.h>

#include "tessera/data/dataset.h"

namespace tessera::train {

/// A module whose forward computes the loss of a batch. It behaves like a pointer to a module, as
/// DistributedDataParallel and FullyShardedDataParallel expect.
struct LossModule {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const Batch&)> loss;

  torch::nn::Module& operator*() const { return *module; }
  const LossModule* operator->() const { return this; }
  at::Tensor forward(const Batch& batch) const { return loss(batch); }
};

}  // namespace tessera::train
