#include "tessera/train/train_step.h"

#include <cmath>
#include <limits>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "train/step/training_step.h"

namespace tessera {

StepModel::StepModel(std::string place, std::string name, ModelWrapper& wrapper,
                     train::TrainingStep& step)
    : place_(std::move(place)), name_(std::move(name)), wrapper_(wrapper), step_(step) {}

at::Tensor StepModel::call(const std::function<at::Tensor()>& function) {
  const train::Autocast autocast(step_.options().autocast);
  return wrapper_.call(function);
}

at::Tensor StepModel::forward(const Batch& batch) {
  const auto& predict = wrapper_.model().predict;
  if (!predict)
    throw UsageError(place_ + name_ +
                     " gives no prediction; expected a model with forward(inputs) or "
                     "predict(batch), or StepModel::call()");
  return call([&] { return predict(wrapper_.cast(batch)); });
}

void StepModel::backward(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1)
    throw UsageError(place_ + name_ + ".backward(): " +
                     (loss.defined() ? "a tensor of shape " + c10::str(loss.sizes())
                                     : std::string("an undefined tensor")) +
                     "; expected a loss of one element");
  // All ranks learn from the gradients that the loss of one is not finite.
  const at::Tensor finite = at::isfinite(loss.detach());
  const at::Tensor factor = at::where(
      finite, at::ones_like(loss), at::full_like(loss, std::numeric_limits<double>::quiet_NaN()));
  step_.backward(loss * factor, 1 / weight_, *scale_);
  pending_ = true;
}

bool StepModel::step() {
  if (!pending_ && wrapper_.gradients().empty())
    throw UsageError(place_ + name_ +
                     ".step(): there are no gradients; expected a backward() of this model since "
                     "its last step() or zero_grad()");
  const auto [norm, updated] = step_.update(*scale_);
  wrapper_.end_step({updated, 1});
  pending_ = false;
  norm_ = norm;
  updated_ = updated_ || updated;
  skipped_ = skipped_ || !updated;
  return updated;
}

bool StepModel::update_params(const at::Tensor& loss) {
  backward(loss);
  return step();
}

void StepModel::zero_grad() {
  wrapper_.drop_gradients();
  wrapper_.end_step({.used = false});
  pending_ = false;
}

std::shared_ptr<void> StepModel::freeze() {
  NamedParameters frozen;
  for (auto& [name, parameter] : named_parameters(module())) {
    if (!parameter.requires_grad()) continue;
    parameter.set_requires_grad(false);
    frozen.emplace_back(name, parameter);
  }
  return {nullptr, [frozen](void*) {
            for (const auto& [name, parameter] : frozen)
              at::Tensor(parameter).set_requires_grad(true);
          }};
}

StepModels::StepModels(std::vector<StepModel> models, ProcessGroup group)
    : models_(std::move(models)), group_(std::move(group)) {
  const auto scale = std::make_shared<double>(0);
  for (auto& model : models_) model.scale_ = scale;
}

StepModel& StepModels::operator[](const std::string& name) {
  for (auto& model : models_)
    if (model.name_ == name) return model;
  throw UsageError(models_.front().place_ + "no model \"" + name + "\"" +
                   suggestion(name, names()));
}

std::vector<std::string> StepModels::names() const {
  std::vector<std::string> result;
  for (const auto& model : models_) result.push_back(model.name_);
  return result;
}

}  // namespace tessera
