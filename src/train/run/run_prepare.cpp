#include <algorithm>

#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/train/devices.h"
#include "train/report/prepare_outputs.h"
#include "train/run/build_model.h"
#include "train/run/given_data.h"
#include "train/run/run.h"
#include "train/run/run_contract.h"
#include "train/run/run_records.h"

// What comes before the first step. Local, except make() and restore(); an error on one rank is
// thrown on all.

namespace tessera::train {
namespace {

at::Device device_of_run(const Config& config, int local_rank) {
  const std::string& name = config.model.device;
  if (config.model.deferred == true && name != "cpu")
    throw UsageError(config.at("model.deferred") + "true, and model.device is " + name +
                     "; expected cpu");
  const auto device = named(config.at("model.device"), [&] { return device_of(name, local_rank); });
  if (config.train.autocast && !device.is_cpu() && !device.is_cuda())
    throw UsageError(config.at("train.autocast") + "model.device is " + name +
                     "; expected no autocast, or a model on cpu or cuda");
  return device;
}

/// What looks at evaluations needs evaluation data.
void check_evaluated(const Config& config, const DataSplits& splits) {
  if (splits.val) return;
  const std::string key = config.checkpoint.keep_best.count > 0     ? "checkpoint.keep_best"
                          : config.train.early_stop.patience > 0    ? "train.early_stop"
                          : !config.metrics.empty() && !splits.test ? "metrics"
                                                                    : "";
  if (!key.empty())
    throw UsageError(config.at(key) + "there are no evaluations, because data.type " +
                     config.data.type + " has no evaluation samples here; expected some");
}

}  // namespace

PreparedRun::PreparedRun(const Config& config, ProcessGroup group, RunSource source,
                         Heartbeat& heartbeat)
    : context_{config, std::move(group), heartbeat} {
  ProcessGroup& all = context_.group;
  heartbeat.enter(Phase::starting, 0);
  agree(all, [&] {
    check_config_world(config, all.size());
    check_config_files(config);
    context_.device = device_of_run(config, all.local_rank());
  });
  // Also the current device, for code that names none.
  if (!context_.device.is_cpu()) on_device_.reset_device(context_.device);
  all = all.with_device(context_.device);
  check_same_config(config, all);
  context_.groups = make_training_groups(config, all);
  checkpoints_.emplace(context_);
  // Layers that communicate get a group of their own, so that their collectives are never matched
  // with the wrapper's or with those of a failed start.
  ProcessGroup own = context_.own_group();
  const ProcessGroup layers = config.model.plan.communicates ? *own.split(0) : own;
  heartbeat.enter(Phase::starting, 0);
  agree(all, [&] { prepare(source); });
  check_same_data(config, data_->splits(), all);
  // After prepare() has succeeded on all ranks, because constructing a model may be collective.
  heartbeat.enter(Phase::starting, 0);
  const Checkpoint* resumed = checkpoints_->resumed();
  agree(all, [&] {
    model_ = build_model(context_, layers);
    weights_.emplace(context_, model_);
    if (resumed == nullptr) weights_->open_init();
  });
  if (resumed != nullptr) resumed->read_together([&] { weights_->open(*resumed); });
  make();
  warn_of_space(context_, weights_->bytes(true), "the weights take", true);
}

void PreparedRun::prepare(RunSource source) {
  const Config& config = context_.config;
  data_ = source == RunSource::datasets ? std::make_unique<RunData>(context_)
                                        : std::make_unique<GivenData>(context_);
  if (source == RunSource::datasets) check_evaluated(config, data_->splits());
  if (context_.first()) {
    const Checkpoint* resumed = checkpoints_->resumed();
    prepare_outputs(config);
    context_.reporter = std::make_unique<Reporter>(config, resumed ? resumed->step() : 0);
    if (data_->splits().baseline) now_.result.baseline_loss = data_->splits().baseline();
  }
  for (const auto& make_hook : config.hooks) hooks_.push_back(make_hook());
  if (context_.reporter && !hooks_.empty()) {
    context_.reporter->set_listener([this](const std::string& json) {
      for (const auto& hook : hooks_) hook->on_record(json);
    });
  }
}

void PreparedRun::make() {
  const Config& config = context_.config;
  wrapper_ = config.parallel.plan.make(
      {model_, config.preprocessor, context_.own_group(), config.optimizer});
  if (data_->joins() && wrapper_->joinable() == nullptr)
    throw UsageError(config.at("data.uneven") + "join is not supported by parallel.type " +
                     config.parallel.type);
  weights_->load(*wrapper_, checkpoints_->resumed());
  context_.groups->start(*wrapper_);
  const RunConfig& train = config.train;
  OptimWrapperOptions options{.accumulative_counts = train.accumulation,
                              .clip_grad_norm = train.clip_grad_norm,
                              .clip_grad_value = train.clip_grad_value,
                              .clip_norm_type = train.clip_norm_type,
                              .autocast = train.autocast,
                              .scaler = train.loss_scale};
  options.nonfinite = train.error_if_nonfinite       ? NonfiniteNorm::error
                      : train.on_nonfinite == "skip" ? NonfiniteNorm::skip
                                                     : NonfiniteNorm::give_up;
  step_.emplace(*wrapper_, options, config.scheduler);
  faults_.emplace(context_, *wrapper_);
  best_.emplace(config);
  if (const Checkpoint* resumed = checkpoints_->resumed()) {
    resumed->read_together([this] { restore(); });
    checkpoints_->publish(*wrapper_);
  } else if (config.train.ema.decay) {
    start_averaging({}, 0);
  }
}

/// Within Checkpoint::read_together().
void PreparedRun::restore() {
  const SavedState state = checkpoints_->read_state();
  named(checkpoints_->state_file() + ": ", [&] {
    data_->load_state(state.data, state.step);
    if (state.loss_scale) step_->scaler().load_state(*state.loss_scale);
    for (size_t i = 0; i < std::min(state.hooks.size(), hooks_.size()); ++i)
      hooks_[i]->load_state(state.hooks[i]);
  });
  now_.done = state.step;
  now_.left_out.insert(state.left_out.begin(), state.left_out.end());
  now_.result.best_eval_loss = state.best_eval_loss;
  if (state.evaluation_due) {
    now_.evaluation_due = data_->splits().val != nullptr;
    now_.record = *state.evaluation_due;
  }
  const auto averages = checkpoints_->restore(state, *wrapper_, *best_);
  if (context_.config.train.ema.decay) start_averaging(averages, state.average_updates.value_or(0));
}

/// `averages`: those of a checkpoint, or none.
void PreparedRun::start_averaging(const std::vector<at::Tensor>& averages, int64_t updates) {
  const EmaConfig& config = context_.config.train.ema;
  std::vector<at::Tensor> live;
  for (const auto& shard : wrapper_->shards()) live.push_back(shard.tensor);
  const size_t shards = live.size();
  average_ = std::make_unique<WeightAverage>(std::move(live), *config.decay,
                                             WeightAverageOptions{config.warmup});
  if (averages.size() == shards) average_->load(averages, updates);
}

void PreparedRun::swap_average() {
  if (!average_) return;
  const torch::NoGradGuard no_grad;
  wrapper_->before_shard_writes();
  average_->swap();
  wrapper_->publish_shards();
}

SavedState PreparedRun::state() const {
  const Config& config = context_.config;
  SavedState state;
  state.step = now_.done;
  state.global_batch = config.train.global_batch;
  state.data = data_->state(now_.done);
  state.parallel = config.parallel.type;
  state.optimizer = config.optimizer.type;
  state.ranks = context_.group.size();
  if (config.train.loss_scale.enabled) state.loss_scale = step_->scaler().state();
  best_->save_state(state.best);
  state.model = config.model.plan.meaning;
  if (now_.evaluation_due) state.evaluation_due = now_.record;
  if (average_) state.average_updates = average_->updates();
  state.left_out = now_.left_out;
  state.best_eval_loss = now_.result.best_eval_loss;
  for (const auto& hook : hooks_) state.hooks.push_back(hook->state());
  return state;
}

}  // namespace tessera::train
