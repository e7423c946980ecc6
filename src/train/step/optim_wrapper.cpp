#include "tessera/train/optim_wrapper.h"

#include "tessera/error.h"
#include "train/step/training_step.h"

namespace tessera {

struct OptimWrapper::Scope::State {
  std::unique_ptr<NoSync> no_sync;
  std::optional<train::Autocast> autocast;
};

OptimWrapper::Scope::Scope(OptimWrapper& wrapper) : state_(std::make_unique<State>()) {
  if (!wrapper.should_sync()) state_->no_sync = wrapper.model_.no_sync();
  state_->autocast.emplace(wrapper.options().autocast);
}

OptimWrapper::Scope::~Scope() = default;

void OptimWrapper::Scope::end_forward() { state_->autocast.reset(); }

OptimWrapper::OptimWrapper(ModelWrapper& model, OptimWrapperOptions options)
    : model_(model), step_(std::make_unique<train::TrainingStep>(model, std::move(options))) {}

OptimWrapper::~OptimWrapper() = default;

const OptimWrapperOptions& OptimWrapper::options() const { return step_->options(); }

GradScaler& OptimWrapper::scaler() { return step_->scaler(); }

OptimizerStateDict OptimWrapper::state_dict() { return model_.optimizer_state_dict(); }

void OptimWrapper::load_state_dict(const OptimizerStateDict& dict) {
  model_.load_optimizer_state_dict(dict);
}

void OptimWrapper::initialize_count_status(int64_t done, int64_t all) {
  if (done < 0 || all < 0 || (all > 0 && done > all))
    throw UsageError("OptimWrapper: count status " + std::to_string(done) + " of " +
                     std::to_string(all) + "; expected 0 <= done <= all");
  done_ = done;
  all_ = all;
}

bool OptimWrapper::should_update() const {
  return (done_ + 1) % options().accumulative_counts == 0 || (all_ > 0 && done_ + 1 == all_);
}

double OptimWrapper::scale_factor() const {
  const int64_t count = options().accumulative_counts;
  const bool in_tail = all_ > 0 && done_ >= all_ / count * count;
  return static_cast<double>(in_tail ? all_ - done_ / count * count : count);
}

void OptimWrapper::update_params(const at::Tensor& loss) {
  step_->backward(loss, scale_factor() / weight_);
  const bool update = should_update();
  ++done_;
  updated_ = skipped_ = false;
  if (!update) return;
  const auto [norm, updated] = step_->update();
  norm_ = norm;
  updated_ = updated;
  skipped_ = !updated;
}

}  // namespace tessera
