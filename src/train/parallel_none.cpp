#include "train/parallel.h"
#include "train/whole_model.h"

namespace tessera::train {
namespace {

/// A world of one rank and an ordinary optimizer.
class Unsharded : public Parallel {
 public:
  Unsharded(const Config& config, Trainee trainee)
      : trainee_(std::move(trainee)), model_(config.optimizer, *trainee_) {}

  at::Tensor forward(const Batch& batch) override { return trainee_.loss(batch); }
  at::Tensor evaluate(const Batch& batch) override { return trainee_.loss(batch); }
  void backward(const at::Tensor& loss) override { loss.backward(); }
  StepFigures step(const at::Tensor& loss, std::optional<double> max_norm) override {
    return {loss.item<double>(), model_.step(max_norm)};
  }

  double lr() const override { return model_.lr(); }
  void set_lr(double lr) override { model_.set_lr(lr); }
  MemoryUse memory() const override { return model_.memory(); }

 private:
  Trainee trainee_;
  WholeModel model_;
};

}  // namespace

std::unique_ptr<Parallel> make_unsharded(const Config& config, Trainee trainee) {
  return std::make_unique<Unsharded>(config, std::move(trainee));
}

}  // namespace tessera::train
