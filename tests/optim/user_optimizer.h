#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include "tessera/detail/torch_compat.h"

// An optimizer as a user would write it: own options, own state, a matrix in the state. Writes of
// its state and options are switched by `Serializable`.

namespace tessera::testing {

template <bool Serializable>
struct UserOptions : torch::optim::OptimizerCloneableOptions<UserOptions<Serializable>> {
  explicit UserOptions(double lr_value = 0.1) : rate(lr_value) {}
  double rate;
  bool loud = false;
  std::tuple<double, double> range{1, 2};

  double get_lr() const override { return rate; }
  void set_lr(const double lr) override { rate = lr; }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    if constexpr (Serializable) {
      archive.write("lr", c10::IValue(rate));
      archive.write("loud", c10::IValue(loud));
      archive.write("range", c10::IValue(range));
    } else {
      torch::optim::OptimizerOptions::serialize(archive);
    }
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("lr", value);
    rate = value.toDouble();
    archive.read("loud", value);
    loud = value.toBool();
    archive.read("range", value);
    range = value.to<std::tuple<double, double>>();
  }
};

template <bool Serializable>
struct UserState : torch::optim::OptimizerCloneableParamState<UserState<Serializable>> {
  at::Tensor average;
  std::vector<at::Tensor> history;
  int64_t count = 0;
  double scale = 1;

  void serialize(torch::serialize::OutputArchive& archive) const override {
    if constexpr (Serializable) {
      archive.write("average", average, true);
      archive.write("history", c10::IValue(history));
      archive.write("count", c10::IValue(count));
      archive.write("scale", c10::IValue(scale));
    } else {
      torch::optim::OptimizerParamState::serialize(archive);
    }
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("average", average, true);
    archive.read("history", value);
    history = value.toTensorVector();
    archive.read("count", value);
    count = value.toInt();
    archive.read("scale", value);
    scale = value.toDouble();
  }
};

template <bool Serializable>
class UserOptimizer : public torch::optim::Optimizer {
 public:
  using Options = UserOptions<Serializable>;
  using State = UserState<Serializable>;

  explicit UserOptimizer(std::vector<torch::optim::OptimizerParamGroup> groups,
                         Options defaults = Options())
      : Optimizer(std::move(groups), std::make_unique<Options>(defaults)) {}

  torch::Tensor step(LossClosure closure = nullptr) override {
    const auto loss = closure ? closure() : at::Tensor();
    const at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (auto& p : group.params()) {
        auto& slot = state_[compat::state_key(p)];
        if (!slot) slot = std::make_unique<State>();
        auto& state = static_cast<State&>(*slot);
        state.average = state.average.defined() ? state.average * 0.5 + p.grad() : p.grad().clone();
        state.history.push_back(p.grad().mean());
        state.count += 1;
        state.scale *= 0.5;
        p.sub_(state.average, group.options().get_lr());
      }
    }
    return loss;
  }
};

}  // namespace tessera::testing
