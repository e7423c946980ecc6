#include "tessera/distributed_optimizer.h"
#include "train/parallel.h"
#include "train/whole_model.h"

namespace tessera::train {
namespace {

DistributedOptimizerOptions distributed_options(const ParallelConfig& config) {
  DistributedOptimizerOptions options;
  options.reduce_method = config.reduce_method;
  options.bcast_period = config.bcast_period;
  options.param_pack = config.param_pack;
  options.param_pack_thd = config.param_pack_thd;
  return options;
}

NamedParameters trained(const torch::nn::Module& module) {
  NamedParameters result;
  for (const auto& [name, tensor] : named_parameters(module)) {
    if (tensor.requires_grad()) {
      result.emplace_back(name, tensor);
    }
  }
  return result;
}

/// MegEngine's: the optimizer reduces what backward produces and updates everything on every rank.
class DistributedTraining : public Parallel {
 public:
  DistributedTraining(const Config& config, Trainee trainee, ProcessGroup group)
      : trainee_(std::move(trainee)),
        group_(group),
        model_(config.optimizer, *trainee_),
        optimizer_(model_.optimizer(), trained(*trainee_), {std::move(group)}, distributed_options(config.parallel)) {}

  at::Tensor forward(const Batch& batch) override { return trainee_.loss(batch); }
  at::Tensor evaluate(const Batch& batch) override { return trainee_.loss(batch); }
  void backward(const at::Tensor& loss) override { optimizer_.backward(loss); }

  StepFigures step(const at::Tensor& loss, std::optional<double> max_norm) override {
    const double norm = model_.step(max_norm, [this] { optimizer_.step(); });
    return {mean_over_ranks(loss, group_, active_ranks_), norm};
  }

  Joinable* joinable() override { return &optimizer_; }
  void shadow_backward() override { optimizer_.shadow_backward(); }
  double lr() const override { return model_.lr(); }
  void set_lr(double lr) override { model_.set_lr(lr); }
  MemoryUse memory() const override { return model_.memory(); }

 private:
  Trainee trainee_;
  ProcessGroup group_;
  WholeModel model_;
  DistributedOptimizer optimizer_;
};

}  // namespace

std::unique_ptr<Parallel> make_distributed(const Config& config, Trainee trainee, ProcessGroup group) {
  return std::make_unique<DistributedTraining>(config, std::move(trainee), std::move(group));
}

}  // namespace tessera::train
