#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <torch/optim/sgd.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/training.h"
#include "tessera/local_sgd.h"

// LocalSGD and DiLoCo with plain tensors in one process.

namespace tessera::testing::local {

inline std::unique_ptr<torch::optim::Optimizer> inner_optimizer(const Uneven& net) {
  return adamw(net->parameters());
}

inline void train_on(Uneven& net, torch::optim::Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  loss_of(net(x)).backward();
  optimizer.step();
}

inline std::vector<ParameterShard> shards_of(const torch::nn::Module& net) {
  return parameter_shards(named_parameters(net));
}

inline at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  for (const auto& tensor : tensors) parts.push_back(tensor.detach().reshape({-1}));
  return at::cat(parts).clone();
}

inline void set_flat(Uneven& net, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  int64_t at = 0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(values.narrow(0, at, parameter.numel()).view(parameter.sizes()));
    at += parameter.numel();
  }
}

/// Replicas that train alone and are synchronised in one process. The outer step is
/// torch::optim::SGD.
class Simulation {
 public:
  /// `train` makes one step of replica `group` in step `step`.
  using Train = std::function<void(Uneven&, torch::optim::Optimizer&, int step, int group)>;

  Simulation(int groups, LocalSgdOptions options, Train train)
      : options_(options), train_(std::move(train)) {
    for (int group = 0; group < groups; ++group) {
      nets_.push_back(seeded<Uneven>(1));
      optimizers_.push_back(inner_optimizer(nets_.back()));
    }
    anchor_ = flat(nets_[0]->parameters());
    const bool average = options.outer == OuterOptimizer::average;
    outer_ = std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>{anchor_},
                                                 torch::optim::SGDOptions(average ? 1 : options.lr)
                                                     .momentum(average ? 0 : options.momentum)
                                                     .nesterov(!average));
  }

  void run(int steps) {
    for (int step = 0; step < steps; ++step) {
      for (size_t group = 0; group < nets_.size(); ++group)
        train_(nets_[group], *optimizers_[group], step, static_cast<int>(group));
      ++steps_;
      if (steps_ % options_.sync_every != 0) continue;
      options_.overlap == Overlap::background ? exchange_in_background() : exchange();
    }
  }

  /// As LocalSgd::synchronize().
  void synchronize() {
    if (mean_.defined()) apply();
    if (steps_ % options_.sync_every != 0) exchange();
  }

  at::Tensor parameters(int group) const {
    return flat(nets_[static_cast<size_t>(group)]->parameters());
  }

 private:
  at::Tensor mean_difference() const {
    at::Tensor sum = at::zeros_like(anchor_);
    for (const auto& net : nets_) sum += anchor_ - flat(net->parameters());
    return sum / static_cast<double>(nets_.size());
  }
  void update(const at::Tensor& gradient) {
    anchor_.mutable_grad() = gradient;
    outer_->step();
  }
  void exchange() {
    update(mean_difference());
    for (auto& net : nets_) set_flat(net, anchor_);
  }
  void apply() {
    update(mean_);
    mean_ = at::Tensor();
    for (size_t i = 0; i < nets_.size(); ++i)
      set_flat(nets_[i], anchor_ + (flat(nets_[i]->parameters()) - starts_[i]));
  }
  void exchange_in_background() {
    if (mean_.defined()) apply();
    mean_ = mean_difference();
    starts_.clear();
    for (const auto& net : nets_) starts_.push_back(flat(net->parameters()));
  }

  LocalSgdOptions options_;
  Train train_;
  int64_t steps_ = 0;
  std::vector<Uneven> nets_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  at::Tensor anchor_, mean_;
  std::vector<at::Tensor> starts_;
  std::unique_ptr<torch::optim::SGD> outer_;
};

/// Every replica trains on a batch of its own.
inline void own_batches(Uneven& net, torch::optim::Optimizer& optimizer, int step, int group) {
  train_on(net, optimizer, own_rows(step, group));
}

struct Case {
  std::string name;
  LocalSgdOptions options;
};

inline std::vector<Case> cases(int64_t sync_every) {
  std::vector<Case> result;
  for (const auto outer : {OuterOptimizer::average, OuterOptimizer::nesterov}) {
    for (const auto wire : {OuterWire::float32, OuterWire::int8}) {
      for (const bool background : {false, true}) {
        LocalSgdOptions options;
        options.sync_every = sync_every;
        options.outer = outer;
        options.wire = wire;
        options.overlap = background ? Overlap::background : Overlap::backward;
        result.push_back({std::string(outer == OuterOptimizer::average ? "average" : "nesterov") +
                              (wire == OuterWire::int8 ? ", int8" : ", float32") +
                              (background ? ", background" : ""),
                          options});
      }
    }
  }
  return result;
}

inline void expect_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                        const std::string& where) {
  ASSERT_EQ(actual.numel(), expected.numel()) << where;
  EXPECT_LE((actual - expected).abs().max().item<double>(), tolerance) << where;
}

}  // namespace tessera::testing::local
