#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"
#include "train/parallel.h"
#include "train/whole_model.h"

namespace tessera::train {
namespace {

ZeroRedundancyOptimizerOptions zero_options(const ParallelConfig& config) {
  ZeroRedundancyOptimizerOptions options;
  for (const Partition partition : {Partition::flat, Partition::whole, Partition::first_fit}) {
    if (config.partition == partition_name(partition)) {
      options.partition = partition;
    }
  }
  options.parameters_as_bucket_view = config.parameters_as_bucket_view;
  options.overlap_with_backward = config.overlap_with_backward;
  options.bucket_cap_mb = config.bucket_cap_mb;
  options.find_unused_parameters = config.find_unused_parameters;
  return options;
}

/// Each rank keeps the optimizer state of its part; step() reduces, updates and gathers in one pass.
class ZeroTraining : public Parallel {
 public:
  ZeroTraining(const Config& config, Trainee trainee, ProcessGroup group)
      : trainee_(std::move(trainee)),
        group_(group),
        optimizer_(*trainee_, std::move(group),
                   default_optimizers().factory(config.optimizer.type, config.optimizer.options),
                   zero_options(config.parallel)) {
    optimizer_.track_grad_norm(!config.train.clip_grad_norm);
  }

  at::Tensor forward(const Batch& batch) override { return trainee_.loss(batch); }
  at::Tensor evaluate(const Batch& batch) override { return trainee_.loss(batch); }
  void backward(const at::Tensor& loss) override { loss.backward(); }

  StepFigures step(const at::Tensor& loss, std::optional<double> max_norm) override {
    double norm = max_norm ? optimizer_.clip_grad_norm_(*max_norm) : 0;
    optimizer_.step();
    if (!max_norm) {
      norm = optimizer_.last_grad_norm();
    }
    optimizer_.zero_grad();
    return {mean_over_ranks(loss, group_, active_ranks_), norm};
  }

  Joinable* joinable() override { return &optimizer_; }
  void shadow_backward() override { optimizer_.shadow_backward(); }
  double lr() const override { return optimizer_.param_groups().front().options().get_lr(); }
  void set_lr(double lr) override { set_group_lr(optimizer_, lr); }

  MemoryUse memory() const override {
    const auto memory = optimizer_.memory();
    return {memory.parameters, memory.gradients, memory.optimizer_state};
  }

  MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const override {
    MemoryUse use = ranks.front();
    use.gradients = use.parameters;
    use.optimizer_state = 0;
    for (const auto& rank : ranks) {
      use.optimizer_state += rank.optimizer_state;
    }
    return use;
  }

 private:
  Trainee trainee_;
  ProcessGroup group_;
  ZeroRedundancyOptimizer optimizer_;
};

}  // namespace

std::unique_ptr<Parallel> make_zero(const Config& config, Trainee trainee, ProcessGroup group) {
  return std::make_unique<ZeroTraining>(config, std::move(trainee), std::move(group));
}

}  // namespace tessera::train
