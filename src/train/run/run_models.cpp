#include "train/run/run_models.h"

#include <algorithm>

#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "train/run/build_model.h"
#include "train/wrappers/models_wrapper.h"

namespace tessera::train {
namespace {

OptimWrapperOptions step_options(const RunConfig& own, const RunConfig& run) {
  OptimWrapperOptions options{.accumulative_counts = run.accumulation,
                              .clip_grad_norm = own.clip_grad_norm,
                              .clip_grad_value = own.clip_grad_value,
                              .clip_norm_type = own.clip_norm_type,
                              .autocast = own.autocast,
                              .scaler = own.loss_scale};
  options.nonfinite = run.error_if_nonfinite       ? NonfiniteNorm::error
                      : run.on_nonfinite == "skip" ? NonfiniteNorm::skip
                                                   : NonfiniteNorm::give_up;
  return options;
}

std::vector<at::Tensor> live_shards(ModelWrapper& wrapper) {
  std::vector<at::Tensor> live;
  for (const auto& shard : wrapper.shards()) live.push_back(shard.tensor);
  return live;
}

/// Like named(), but also for errors that all ranks have.
template <class Function>
auto placed(const std::string& place, const Function& function) {
  try {
    return function();
  } catch (const AgreedError& error) {
    throw AgreedError(place + error.what());
  } catch (const UsageError& error) {
    throw UsageError(place + error.what());
  }
}

}  // namespace

void RunModels::build(const ProcessGroup& layers, bool init) {
  for (const ModelSections* own : context_.config.trained()) {
    RunModel& model = models_.emplace_back(RunModel{*own});
    model.model = build_model(context_, *own, layers);
    model.weights = std::make_unique<RunWeights>(context_, *own, model.model);
    if (init) model.weights->open_init();
  }
  if (!context_.config.models.empty()) join();
}

/// Makes one model of several.
void RunModels::join() {
  all_.module = std::make_shared<torch::nn::Module>();
  for (const auto& model : models_)
    all_.module->register_module(model.own.name, model.model.module);
  all_.loss = [this](const Batch& batch) {
    const Config& config = context_.config;
    if (!config.train_step.evaluate)
      throw UsageError(config.at("train_step") +
                       "there are no evaluations; expected a train step with evaluate()");
    return config.train_step.evaluate(*step_models_, batch);
  };
  if (context_.config.train_step.predict)
    all_.predict = [this](const Batch& batch) {
      return context_.config.train_step.predict(*step_models_, batch);
    };
  all_weights_ = std::make_unique<RunWeights>(context_, context_.config, all_);
}

void RunModels::wrap(const Checkpoint* resumed) {
  const Config& config = context_.config;
  const bool several = !config.models.empty();
  for (auto& model : models_) {
    const ModelSections& own = model.own;
    OptimizerPlan optimizer = own.optimizer;
    for (const auto& [name, parameter] : named_parameters(*model.model.module))
      if (parameter.is_floating_point() && c10::elementSize(parameter.scalar_type()) == 2)
        optimizer.master_weights = true;
    model.wrapper = placed(several ? own.at("parallel.type") : "", [&] {
      return own.parallel.plan.make(
          {model.model, several ? nullptr : config.preprocessor, context_.own_group(), optimizer});
    });
    model.step = std::make_unique<TrainingStep>(
        *model.wrapper, step_options(own.train, config.train), own.scheduler);
  }
  if (several) {
    const std::string place = config.at("train_step");
    std::vector<NamedWrapper> wrappers;
    std::vector<StepModel> steps;
    for (const auto& model : models_) {
      wrappers.push_back({model.own.name, *model.wrapper});
      steps.emplace_back(place, model.own.name, *model.wrapper, *model.step);
    }
    joined_ = std::make_unique<ModelsWrapper>(std::move(wrappers), all_, config.preprocessor,
                                              context_.own_group());
    step_models_ = std::make_unique<StepModels>(std::move(steps), context_.own_group());
    models_step_ = make_models_step(config.train_step, *step_models_, *joined_, place);
    all_weights_->load(*joined_, resumed);
  }
  for (const auto& model : models_)
    model.weights->load(*model.wrapper, several ? nullptr : resumed);
  context_.groups->start(whole());
  for (auto& model : models_)
    if (const EmaConfig& ema = model.own.train.ema; ema.decay)
      model.average = std::make_unique<WeightAverage>(live_shards(*model.wrapper), *ema.decay,
                                                      WeightAverageOptions{ema.warmup});
}

void RunModels::restore(const std::map<std::string, SavedModel>& saved,
                        const std::vector<at::Tensor>& averages) {
  auto next = averages.begin();
  for (auto& model : models_) {
    const SavedModel& own = saved.at(model.own.name);
    if (own.loss_scale) model.step->scaler().load_state(*own.loss_scale);
    const auto shards = live_shards(*model.wrapper);
    const auto first = next;
    next += static_cast<std::ptrdiff_t>(shards.size());
    if (!model.average) continue;
    const bool has = std::all_of(first, next, [](const auto& each) { return each.defined(); });
    // Without saved averages, the averages begin with the weights of the checkpoint.
    model.average->load(has ? std::vector<at::Tensor>(first, next) : shards,
                        has ? own.average_updates.value_or(0) : 0);
  }
}

std::map<std::string, SavedModel> RunModels::state() const {
  std::map<std::string, SavedModel> all;
  for (const auto& model : models_) {
    SavedModel& saved = all[model.own.name];
    saved.parallel = model.own.parallel.type;
    saved.optimizer = model.own.optimizer.type;
    if (model.own.train.loss_scale.enabled) saved.loss_scale = model.step->scaler().state();
    saved.meaning = model.own.model.plan.meaning;
    if (model.average) saved.average_updates = model.average->updates();
  }
  return all;
}

void RunModels::begin_step(int64_t step) {
  for (const auto& model : models_) freeze_for_step(model.own, *model.model.module, step);
}

void RunModels::end_step(const StepResult& result) {
  for (size_t i = 0; i < models_.size(); ++i)
    if (models_[i].average && result.updates[i]) models_[i].average->update();
}

void RunModels::swap_averages() {
  const torch::NoGradGuard no_grad;
  for (const auto& model : models_) {
    if (!model.average) continue;
    model.wrapper->before_shard_writes();
    model.average->swap();
    model.wrapper->publish_shards();
  }
}

void RunModels::drop_averages() {
  for (auto& model : models_) model.average.reset();
}

std::vector<at::Tensor> RunModels::averages() const {
  std::vector<at::Tensor> all;
  for (const auto& model : models_) {
    const auto own = model.average ? model.average->averages()
                                   : std::vector<at::Tensor>(model.wrapper->shards().size());
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

int64_t RunModels::state_bytes() const {
  int64_t bytes = 0;
  for (const auto& model : models_) {
    const auto ranks = static_cast<size_t>(context_.own_group().size());
    const MemoryUse whole = model.wrapper->unsharded({ranks, model.wrapper->memory()});
    bytes += whole.optimizer_state + (model.average ? whole.parameters : 0);
  }
  return bytes;
}

void RunModels::save(int64_t steps) {
  for (const auto& model : models_) {
    model.weights->save(steps);
    model.weights->save_optimizer();
  }
}

}  // namespace tessera::train
