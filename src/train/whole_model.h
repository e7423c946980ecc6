#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "train/parallel.h"

namespace tessera::train {

/// What the strategies share whose ranks hold whole gradients: an ordinary optimizer over all parameters, the norm and
/// clipping of the gradients as they stand. Local.
class WholeModel {
 public:
  WholeModel(const OptimizerConfig& config, const torch::nn::Module& module);

  /// Clips to `max_norm` if given, updates, lets go of the gradients. Returns their 2-norm before clipping.
  /// `update`: in place of the optimizer's own step.
  double step(std::optional<double> max_norm, const std::function<void()>& update = nullptr);

  const std::shared_ptr<torch::optim::Optimizer>& optimizer() const { return optimizer_; }
  double lr() const;
  void set_lr(double lr);
  MemoryUse memory() const;

 private:
  double grad_norm() const;

  std::vector<at::Tensor> parameters_;  // those that are trained
  int64_t parameter_bytes_ = 0;         // of all
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
};

/// The learning rate of the first group; and the same for all.
double group_lr(torch::optim::Optimizer& optimizer);
void set_group_lr(torch::optim::Optimizer& optimizer, double lr);

}  // namespace tessera::train
