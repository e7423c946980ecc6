#pragma once

#include "tessera/train/model_wrapper.h"

namespace tessera::train {

/// A wrapper with its name.
struct NamedWrapper {
  std::string name;
  ModelWrapper& wrapper;
};

/// Several models as one ModelWrapper, for checkpoints, averages, evaluations and checks. The names
/// of parameters begin with the model's name. A train step makes the steps, so the members for a
/// step throw UsageError.
class ModelsWrapper final : public ModelWrapper {
 public:
  /// `model`: its module has the modules of the models as children, by their names. The wrappers
  /// must live longer.
  ModelsWrapper(std::vector<NamedWrapper> models, TrainedModel model, Preprocessor preprocessor,
                ProcessGroup group);

  std::vector<at::Tensor> gradients() override;
  double update(const GradientRules& rules) override;
  void drop_gradients() override;
  torch::optim::Optimizer& optimizer() override;
  void wait() override;
  std::vector<ParameterShard> shards() override;
  std::vector<ParameterShard> loaded_shards() override;
  std::vector<std::pair<std::string, at::Tensor>> replicas() override;
  void before_shard_writes() override;
  void publish_shards() override;
  std::vector<StateSlice> state_slices() override;
  void load_state_slices(std::vector<StateSlice>&& slices) override;
  OptimizerStateDict optimizer_state_dict() override;
  void load_optimizer_state_dict(const OptimizerStateDict& dict) override;
  std::vector<size_t> saved_shards() override;
  std::shared_ptr<void> whole_on_rank0() override;
  at::Tensor whole_parameter(const std::string& name, int to) override;
  std::vector<std::pair<std::string, at::Tensor>> extra_state() override;
  void load_extra_state(const std::vector<std::pair<std::string, at::Tensor>>& state) override;
  MemoryUse memory() override;

 private:
  [[noreturn]] void refuse(const char* member) const;

  std::vector<NamedWrapper> models_;
};

}  // namespace tessera::train
