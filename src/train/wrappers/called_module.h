#pragma once

#include <functional>
#include <memory>

#include <torch/nn/module.h>

namespace tessera::train {

/// A module whose forward is any function that uses it. It behaves like a pointer to a module, as
/// DistributedDataParallel and FullyShardedDataParallel expect.
struct CalledModule {
  std::shared_ptr<torch::nn::Module> module;

  torch::nn::Module& operator*() const { return *module; }
  const CalledModule* operator->() const { return this; }
  at::Tensor forward(const std::function<at::Tensor()>& function) const { return function(); }
};

}  // namespace tessera::train
