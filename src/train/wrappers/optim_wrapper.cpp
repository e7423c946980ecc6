#include "tessera/train/optim_wrapper.h"

#include <cmath>

#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#include "tessera/train/model_wrapper.h"

namespace tessera {

struct OptimWrapper::Scope::State {
  std::unique_ptr<NoSync> no_sync;
  std::optional<compat::AutocastState::Scope> autocast;
};

OptimWrapper::Scope::Scope(OptimWrapper& wrapper) : state_(std::make_unique<State>()) {
  if (!wrapper.should_sync()) {
    state_->no_sync = wrapper.model_.no_sync();
  }
  if (const auto dtype = wrapper.options_.autocast) {
    compat::AutocastState on = compat::AutocastState::current();
    on.cpu = {*dtype == at::kBFloat16, at::kBFloat16};
    on.cuda = {true, *dtype};
    state_->autocast.emplace(on);
  }
}

OptimWrapper::Scope::~Scope() = default;

void OptimWrapper::Scope::end_forward() {
  if (state_->autocast) {
    state_->autocast.reset();
    at::autocast::clear_cache();
  }
}

OptimWrapper::OptimWrapper(ModelWrapper& model, OptimWrapperOptions options)
    : model_(model), options_(std::move(options)), scaler_(options_.scaler) {
  const auto refuse = [](const std::string& option, const std::string& why) {
    throw UsageError("OptimWrapper: " + option + ": " + why);
  };
  if (options_.accumulative_counts < 1) {
    refuse("accumulative_counts",
           std::to_string(options_.accumulative_counts) + "; expected a whole number >= 1");
  }
  for (const auto& [name, value] : {std::pair("clip_grad_norm", options_.clip_grad_norm),
                                    std::pair("clip_grad_value", options_.clip_grad_value)}) {
    if (value && !(*value > 0)) refuse(name, std::to_string(*value) + "; expected a number > 0");
  }
  if (!(options_.clip_norm_type > 0)) {
    refuse("clip_norm_type",
           std::to_string(options_.clip_norm_type) + "; expected a number > 0, or infinity");
  }
  if (options_.autocast && *options_.autocast != at::kBFloat16 && *options_.autocast != at::kHalf) {
    refuse("autocast",
           std::string(at::toString(*options_.autocast)) + "; expected bfloat16 or float16");
  }
}

OptimWrapper::~OptimWrapper() = default;

OptimizerStateDict OptimWrapper::state_dict() { return model_.optimizer_state_dict(); }

void OptimWrapper::load_state_dict(const OptimizerStateDict& dict) {
  model_.load_optimizer_state_dict(dict);
}

void OptimWrapper::initialize_count_status(int64_t done, int64_t all) {
  if (done < 0 || all < 0 || (all > 0 && done > all)) {
    throw UsageError("OptimWrapper: count status " + std::to_string(done) + " of " +
                     std::to_string(all) + "; expected 0 <= done <= all");
  }
  done_ = done;
  all_ = all;
}

bool OptimWrapper::should_update() const {
  return (done_ + 1) % options_.accumulative_counts == 0 || (all_ > 0 && done_ + 1 == all_);
}

double OptimWrapper::scale_factor() const {
  const int64_t count = options_.accumulative_counts;
  const bool in_tail = all_ > 0 && done_ >= all_ / count * count;
  return static_cast<double>(in_tail ? all_ - done_ / count * count : count);
}

void OptimWrapper::update_params(const at::Tensor& loss) {
  model_.check_frozen();
  if (loss.defined()) {
    const double factor = scale_factor() / weight_;
    model_.backward(scaler_.scale(factor == 1 ? loss : loss / factor));
  } else {
    model_.shadow_backward();
  }
  const bool update = should_update();
  ++done_;
  updated_ = skipped_ = false;
  if (!update) {
    return;
  }
  if (options_.before_update && !options_.before_update()) {
    skipped_ = true;
    norm_ = std::nan("");
    model_.drop_gradients();
    return model_.update_wire_feedback(false, 1);
  }
  const bool scaled = options_.scaler.enabled, skip = scaled || options_.skip_nonfinite;
  if (scaled) {
    const torch::NoGradGuard no_grad;
    for (const auto& gradient : model_.gradients()) at::Tensor(gradient).mul_(scaler_.inverse());
  }
  // An infinity on any rank makes the norm infinite or NaN, so no other check is needed.
  norm_ = model_.update({options_.clip_grad_norm, options_.clip_grad_value, options_.clip_norm_type,
                         options_.error_if_nonfinite, skip, options_.norm_may_follow && !scaled});
  skipped_ = skip && !std::isfinite(norm_);
  updated_ = !skipped_;
  const double scale = scaler_.scale();
  if (scaled) scaler_.update(skipped_);
  model_.update_wire_feedback(updated_, scaler_.scale() / scale);
}

}  // namespace tessera
