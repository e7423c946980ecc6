#pragma once

#include <functional>

#include "tessera/train/model_wrapper.h"
#include "train/wrappers/wrapper_functions.h"

namespace tessera::train {

/// Base class of the wrappers in which every rank has whole parameters and gradients: an ordinary
/// optimizer over all parameters, and norm and clipping of the local gradients.
class WholeWrapper : public ModelWrapper {
 public:
  explicit WholeWrapper(WrapperContext context);

  std::vector<at::Tensor> gradients() override;
  double update(const GradientRules& rules) override;
  void drop_gradients() override;
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }

  std::vector<ParameterShard> shards() override;
  std::vector<std::pair<std::string, at::Tensor>> replicas() override {
    auto result = named_parameters(*model_.module);
    add_buffers(result);
    return result;
  }
  ProcessGroup shard_copies() const override { return group_; }
  void publish_shards() override {}
  std::vector<StateSlice> state_slices() override {
    return tessera::state_slices(*optimizer_, shards());
  }
  void load_state_slices(std::vector<StateSlice>&& slices) override {
    tessera::load_state_slices(*optimizer_, shards(), std::move(slices));
  }
  OptimizerStateDict optimizer_state_dict() override {
    return group_.rank() == 0 ? state_dict(*optimizer_, named_) : OptimizerStateDict{};
  }
  void load_optimizer_state_dict(const OptimizerStateDict& dict) override {
    load_state_dict(*optimizer_, named_, dict);
  }
  /// Every rank has all shards, and saves its part of them.
  std::vector<size_t> saved_shards() override;
  at::Tensor whole_parameter(const std::string& name, int /*to*/) override {
    return own_parameter(*model_.module, name);
  }
  MemoryUse memory() override;

 protected:
  /// Updates the parameters.
  virtual void step() { optimizer_->step(); }
  virtual int64_t gradient_bytes() const;
  const std::shared_ptr<torch::optim::Optimizer>& shared_optimizer() const { return optimizer_; }
  const NamedParameters& named() const { return named_; }  ///< the trained parameters

 private:
  NamedParameters named_;
  std::shared_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace tessera::train
