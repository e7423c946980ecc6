#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "train/parallel.h"
#include "train/whole_model.h"

namespace tessera::train {
namespace {

std::vector<at::Tensor> trained(const std::vector<at::Tensor>& pieces) {
  std::vector<at::Tensor> result;
  for (const auto& piece : pieces) {
    if (piece.requires_grad()) {
      result.push_back(piece);
    }
  }
  return result;
}

/// Every rank keeps its pieces of parameters, gradients and optimizer state; units are whole while they are used.
class ShardedTraining : public Parallel {
 public:
  ShardedTraining(const Config& config, Trainee trainee, ProcessGroup group)
      : group_(group),
        fsdp_(std::move(trainee), std::move(group), config.parallel.fsdp),
        pieces_(trained(fsdp_.parameters())),
        optimizer_(default_optimizers().factory(config.optimizer.type, config.optimizer.options)(
            {torch::optim::OptimizerParamGroup(pieces_)})) {
    fsdp_.check_optimizer(*optimizer_);
  }

  at::Tensor forward(const Batch& batch) override { return fsdp_(batch); }
  at::Tensor evaluate(const Batch& batch) override { return fsdp_(batch); }
  void backward(const at::Tensor& loss) override { loss.backward(); }

  StepFigures step(const at::Tensor& loss, std::optional<double> max_norm) override {
    const double norm = max_norm ? fsdp_.clip_grad_norm_(*max_norm) : fsdp_.grad_norm();
    optimizer_->step();
    for (auto& piece : pieces_) {
      piece.mutable_grad() = at::Tensor();
    }
    return {mean_over_ranks(loss, group_, active_ranks_), norm};
  }

  Joinable* joinable() override { return &fsdp_; }
  void shadow_backward() override { fsdp_.shadow_backward(); }

  std::unique_ptr<FullParams> whole_on_rank0() override {
    return std::unique_ptr<FullParams>(new FullParams(fsdp_.summon_full_params("", false, true)));
  }

  double lr() const override { return group_lr(*optimizer_); }
  void set_lr(double lr) override { set_group_lr(*optimizer_, lr); }

  MemoryUse memory() const override {
    const auto memory = fsdp_.memory();
    MemoryUse use{memory.parameters, memory.gradients, 0};
    for (const auto& piece : pieces_) {
      if (const auto state = get_state(*optimizer_, piece)) {
        for (const auto& [name, tensor] : state->tensors) {
          use.optimizer_state += static_cast<int64_t>(tensor.nbytes());
        }
      }
    }
    return use;
  }

  MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const override {
    MemoryUse use;
    for (const auto& rank : ranks) {
      use.parameters += rank.parameters;
      use.gradients += rank.gradients;
      use.optimizer_state += rank.optimizer_state;
    }
    return use;
  }

 private:
  ProcessGroup group_;
  FullyShardedDataParallel<Trainee> fsdp_;
  std::vector<at::Tensor> pieces_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

}  // namespace

std::unique_ptr<Parallel> make_fsdp(const Config& config, Trainee trainee, ProcessGroup group) {
  return std::make_unique<ShardedTraining>(config, std::move(trainee), std::move(group));
}

}  // namespace tessera::train
