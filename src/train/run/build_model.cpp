#include "train/run/build_model.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <sstream>

#include "tessera/detail/name_pattern.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/step/agreement.h"
#include "train/state/random_state.h"

namespace tessera::train {
namespace {

/// True if the model is constructed without memory for its parameters.
bool defers(const ModelSections& config) {
  const bool on_cpu = config.model.device == "cpu";
  return config.model.deferred.value_or(on_cpu &&
                                        config.parallel.type == "FullyShardedDataParallel");
}

/// The first step that trains a parameter: 0, the step of its rule, or kNever.
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
int64_t trained_from(const ModelSections& config, const std::string& name) {
  int64_t from = 0;
  for (const auto& [patterns, until] : config.model.freeze)
    for (const auto& pattern : patterns)
      if (detail::matches_name(pattern.c_str(), name.c_str()))
        from = std::max(from, until > 0 ? until : kNever);
  return from;
}

/// Applies the rules of model.freeze that hold for the whole run, and checks all.
void freeze_parameters(const ModelSections& config, const torch::nn::Module& module) {
  const auto parameters = named_parameters(module);
  for (const auto& rule : config.model.freeze)
    for (const auto& pattern : rule.patterns)
      if (std::none_of(parameters.begin(), parameters.end(), [&](const auto& entry) {
            return detail::matches_name(pattern.c_str(), entry.first.c_str());
          }))
        throw UsageError(config.at("model.freeze") + "\"" + pattern +
                         "\" matches no parameter; expected names such as " +
                         parameters.front().first);
  bool any = false;
  for (auto [name, parameter] : parameters) {
    const int64_t from = trained_from(config, name);
    if (from == kNever) parameter.set_requires_grad(false);
    any = any || (from == 0 && parameter.requires_grad());
  }
  if (!any)
    throw UsageError(config.at("model.freeze") +
                     "all parameters are frozen; expected at least one that is trained");
}

/// Calls the config's loss. An error in it is reported with the config's place and the shapes.
Losses loss_of(const Config& config, const at::Tensor& prediction, const Batch& batch) {
  try {
    return config.loss(prediction, batch);
  } catch (const c10::Error& error) {
    std::ostringstream shapes;
    shapes << "of a prediction of shape " << prediction.sizes() << " and targets of shape "
           << batch.targets.sizes();
    const std::string type = config.options ? config.value("loss.type") + " " : "";
    throw Error(config.at("loss.type") + type + shapes.str() + ": " + message_of(error));
  }
}

void add_loss(const Config& config, TrainedModel& model) {
  if (config.loss) {
    if (!model.predict)
      throw UsageError(config.at("loss") + "model " + config.model.type +
                       " gives no prediction; expected a forward(inputs) or predict(batch)");
    model.loss_of_prediction = [&config](const at::Tensor& prediction, const Batch& batch) {
      return loss_of(config, prediction, batch);
    };
    model.loss = [predict = model.predict, loss = model.loss_of_prediction](const Batch& batch) {
      return loss(predict(batch), batch);
    };
  }
  if (!model.loss)
    throw UsageError(
        config.at("model.type") + config.model.type +
        " has no loss of its own; expected a section loss, as in loss: {type: cross_entropy}");
  if (!config.metrics.empty() && !model.predict)
    throw UsageError(config.at("metrics") + "model " + config.model.type +
                     " gives no prediction; expected a forward(inputs) or predict(batch)");
}

/// Converts parameters and buffers. Module::to(dtype) would convert counters, too.
void convert(torch::nn::Module& module, at::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  const auto convert_one = [dtype](at::Tensor tensor) {
    if (tensor.defined() && tensor.is_floating_point()) tensor.set_data(tensor.to(dtype));
  };
  for (const auto& [name, parameter] : named_parameters(module)) convert_one(parameter);
  for (const auto& buffer : module.buffers()) convert_one(buffer);
}

/// The model gets inputs of `dtype`; a loss of the config and metrics get float32.
void convert_inputs(TrainedModel& model, at::ScalarType dtype) {
  const auto converted = [dtype](Batch batch) {
    if (batch.inputs.is_floating_point()) batch.inputs = batch.inputs.to(dtype);
    return batch;
  };
  if (model.loss)
    model.loss = [loss = model.loss, converted](const Batch& batch) {
      return loss(converted(batch));
    };
  if (model.predict)
    model.predict = [predict = model.predict, converted](const Batch& batch) {
      return predict(converted(batch)).to(at::kFloat);
    };
}

}  // namespace

TrainedModel build_model(const RunContext& context, const ModelSections& own,
                         const ProcessGroup& layers) {
  // Every rank draws the same initial weights. Ranks that are threads of one process share the
  // generator, so only one of them may draw at a time. Models that communicate in their
  // constructors wait for the other ranks and must not hold the lock.
  static std::mutex one_at_a_time;
  std::unique_lock lock(one_at_a_time, std::defer_lock);
  if (!own.model.plan.communicates) lock.lock();
  torch::manual_seed(own.model.seed);
  TrainedModel model = named(own.at("model"), [&] {
    std::optional<DeferredScope> scope;
    if (defers(own)) scope.emplace();
    TrainedModel made = own.model.plan.make({layers, own.model.seed});
    if (made.module && own.model.param_dtype) convert(*made.module, *own.model.param_dtype);
    return made;
  });
  if (!model.module) throw UsageError(own.at("model.type") + own.model.type + " made no module");
  if (own.model.param_dtype) convert_inputs(model, *own.model.param_dtype);
  if (own.name.empty()) add_loss(context.config, model);  // otherwise a train step has the losses
  model.module->to(context.device);
  freeze_parameters(own, *model.module);
  // Dropout uses the global generator; every rank must draw different masks.
  seed_generators(context.config.model.seed + static_cast<uint64_t>(context.group.rank()),
                  context.device);
  return model;
}

void freeze_for_step(const ModelSections& own, const torch::nn::Module& module, int64_t step) {
  const auto& rules = own.model.freeze;
  if (std::none_of(rules.begin(), rules.end(), [](const auto& rule) { return rule.until > 0; }))
    return;
  for (auto [name, parameter] : named_parameters(module)) {
    const int64_t from = trained_from(own, name);
    if (from == 0 || from == kNever) continue;  // a parameter that the program froze stays frozen
    parameter.set_requires_grad(step >= from);
  }
}

}  // namespace tessera::train
