#include <algorithm>

#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/train/devices.h"
#include "train/report/prepare_outputs.h"
#include "train/run/given_data.h"
#include "train/run/run.h"
#include "train/run/run_contract.h"
#include "train/run/run_records.h"

// The work before the first step. Local, except make() and restore(); an error on one rank is
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

/// Options that use evaluations need evaluation data.
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
    : context_{config, std::move(group), heartbeat}, models_(context_) {
  ProcessGroup& all = context_.group;
  heartbeat.enter(Phase::starting, 0);
  agree(all, [&] {
    check_config_world(config, all.size());
    check_config_files(config);
    context_.device = device_of_run(config, all.local_rank());
  });
  // Sets the current device too, for code that names no device.
  if (!context_.device.is_cpu()) on_device_.reset_device(context_.device);
  all = all.with_device(context_.device);
  check_same_config(config, all);
  context_.groups = make_training_groups(config, all);
  checkpoints_.emplace(context_);
  // Layers that communicate get a group of their own, so that their collectives are never matched
  // with the wrapper's or a failed start's.
  ProcessGroup own = context_.own_group();
  const auto trained = config.trained();
  const bool communicates = std::any_of(trained.begin(), trained.end(), [](const auto* model) {
    return model->model.plan.communicates;
  });
  const ProcessGroup layers = communicates ? *own.split(0) : own;
  heartbeat.enter(Phase::starting, 0);
  agree(all, [&] { prepare(source); });
  check_same_data(config, data_->splits(), all);
  // After prepare() has succeeded on all ranks, because constructing a model may be collective.
  heartbeat.enter(Phase::starting, 0);
  const Checkpoint* resumed = checkpoints_->resumed();
  agree(all, [&] { models_.build(layers, resumed == nullptr); });
  if (resumed != nullptr) resumed->read_together([&] { models_.weights().open(*resumed); });
  make();
  warn_of_space(context_, models_.weights().bytes(true), "the weights take", true);
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
  const Checkpoint* resumed = checkpoints_->resumed();
  models_.wrap(resumed);
  ModelWrapper& whole = models_.whole();
  if (data_->joins() && whole.joinable() == nullptr)
    throw UsageError(config.at("data.uneven") + "join is not supported by parallel.type " +
                     config.parallel.type);
  faults_.emplace(context_, whole);
  best_.emplace(config);
  if (resumed == nullptr) return;
  resumed->read_together([this] { restore(); });
  checkpoints_->publish(whole);
}

/// Within Checkpoint::read_together().
void PreparedRun::restore() {
  const SavedState state = checkpoints_->read_state();
  named(checkpoints_->state_file() + ": ", [&] {
    data_->load_state(state.data, state.step);
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
  models_.restore(state.models, checkpoints_->restore(state, models_.whole(), *best_));
}

SavedState PreparedRun::state() const {
  const Config& config = context_.config;
  SavedState state;
  state.step = now_.done;
  state.global_batch = config.train.global_batch;
  state.data = data_->state(now_.done);
  state.ranks = context_.group.size();
  best_->save_state(state.best);
  state.models = models_.state();
  if (now_.evaluation_due) state.evaluation_due = now_.record;
  state.left_out = now_.left_out;
  state.best_eval_loss = now_.result.best_eval_loss;
  for (const auto& hook : hooks_) state.hooks.push_back(hook->state());
  return state;
}

}  // namespace tessera::train
