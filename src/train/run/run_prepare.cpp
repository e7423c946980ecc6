#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <sstream>

#include <fmt/format.h>

#include "tessera/detail/name_pattern.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/save_weights.h"
#include "tessera/step/agreement.h"
#include "tessera/train/devices.h"
#include "train/report/free_space.h"
#include "train/report/prepare_outputs.h"
#include "train/run/random_state.h"
#include "train/run/run.h"
#include "train/run/run_contract.h"

namespace tessera::train {

Run::Run(const Config& config, ProcessGroup group, std::set<int64_t> left_out, Heartbeat& heartbeat)
    : config_(config),
      group_(std::move(group)),
      heartbeat_(heartbeat),
      left_out_(std::move(left_out)) {
  heartbeat_.enter(Phase::starting, 0);
  agree(group_, [&] {
    check_config_world(config_, group_.size());
    check_config_files(config_);
    choose_device();
  });
  group_ = group_.with_device(device_);
  check_same_config(config_, group_);
  groups_.emplace(config_, group_);
  open_checkpoints();
  // Layers that communicate get a group of their own, so that their collectives are never matched
  // with the wrapper's or with those of a failed start.
  ProcessGroup own = own_group();
  const ProcessGroup layers = config_.model.plan.communicates ? *own.split(0) : own;
  heartbeat_.enter(Phase::starting, 0);
  agree(group_, [&] { prepare(); });
  check_same_data(config_, data_, group_);
  // After prepare() has succeeded on all ranks, because constructing a model may be collective.
  heartbeat_.enter(Phase::starting, 0);
  agree(group_, [&] { make_model(layers); });
  if (resumed_) resumed_->read_together([&] { open_checkpoint_weights(); });
  make();
  warn_of_space(bytes_of_weights(), "the weights take", true);
}

/// The device is also the current one, for code that names none.
void Run::choose_device() {
  if (config_.model.deferred == true && config_.model.device != "cpu") {
    throw UsageError(config_.at("model.deferred") + "true, and model.device is " +
                     config_.model.device + "; expected cpu");
  }
  device_ = named(config_.at("model.device"),
                  [&] { return device_of(config_.model.device, group_.local_rank()); });
  if (device_.is_cpu()) return;
  if (config_.train.autocast && !device_.is_cuda()) {
    throw UsageError(config_.at("train.autocast") + "model.device is " + config_.model.device +
                     "; expected no autocast, or a model on cpu or cuda");
  }
  on_device_.reset_device(device_);
}

void Run::prepare() {
  load_data();
  if (first()) {
    prepare_outputs(config_);
    reporter_ = std::make_unique<Reporter>(config_, resumed_ ? resumed_->step() : 0);
    if (data_.baseline) {
      result_.baseline_loss = data_.baseline();
    }
  }
  for (const auto& make_hook : config_.hooks) {
    hooks_.push_back(make_hook());
  }
  if (reporter_ && !hooks_.empty()) {
    reporter_->set_listener([this](const std::string& json) {
      for (const auto& hook : hooks_) hook->on_record(json);
    });
  }
}

void Run::load_data() {
  data_ = config_.data.plan.load();
  if (!data_.train) {
    throw UsageError(config_.at("data.type") + config_.data.type + " gives no training data");
  }
  const int64_t samples = data_.train->size();
  sampler_.emplace(samples, config_.data.order, config_.data.seed);
  const int64_t batch = config_.train.global_batch;
  int64_t steps = config_.train.steps;
  if (config_.train.epochs > 0) {
    const double whole = std::floor(config_.train.epochs * static_cast<double>(samples) /
                                    static_cast<double>(batch));
    // Samples are counted in 64 bits, rounded up to whole iterations of any world size.
    constexpr double kMostOfEpochs = 4e18;
    if (whole > kMostOfEpochs / static_cast<double>(batch)) {
      throw UsageError(config_.at("train.epochs") + fmt::format("{} times ", config_.train.epochs) +
                       std::to_string(samples) + " samples; expected at most 4e18 samples in all");
    }
    steps = static_cast<int64_t>(whole);
    if (steps == 0) {
      throw UsageError(config_.at("train.epochs") + "less than one step of " +
                       std::to_string(batch) + " samples in " + std::to_string(samples) +
                       "; expected more epochs or a smaller train.global_batch");
    }
  }
  assignment_.emplace(steps, batch, group_.size());
  if (uneven() && iterations() == 0 && steps > 0) {
    throw UsageError(config_.at("data.uneven") + "drop leaves no step in which every rank has " +
                     std::to_string(assignment_->per_rank) +
                     " sequences; expected more steps, or join");
  }
}

void Run::make_model(const ProcessGroup& own_group) {
  // Every rank draws the same initial weights. Ranks that are threads of one process share the
  // generator, so only one of them may draw at a time. Models that communicate in their
  // constructors wait for the other ranks and must not hold the lock.
  static std::mutex one_at_a_time;
  std::unique_lock lock(one_at_a_time, std::defer_lock);
  if (!config_.model.plan.communicates) {
    lock.lock();
  }
  torch::manual_seed(config_.model.seed);
  model_ = named(config_.at("model"), [&] {
    std::optional<DeferredScope> scope;
    if (defers()) scope.emplace();
    return config_.model.plan.make({own_group, config_.model.seed});
  });
  if (!model_.module) {
    throw UsageError(config_.at("model.type") + config_.model.type + " made no module");
  }
  if (config_.loss) {
    if (!model_.predict) {
      throw UsageError(config_.at("loss") + "model " + config_.model.type +
                       " gives no prediction; expected a forward(inputs) or predict(batch)");
    }
    model_.loss = [this, predict = model_.predict](const Batch& batch) {
      return loss_of(predict(batch), batch);
    };
  }
  if (!model_.loss) {
    throw UsageError(
        config_.at("model.type") + config_.model.type +
        " has no loss of its own; expected a section loss, as in loss: {type: cross_entropy}");
  }
  model_.module->to(device_);
  freeze_parameters();
  note_specs();
  check_specs();
  if (!resumed_ && !config_.model.init.empty()) open_init();
  if (!resumed_ && !config_.optimizer_init.path.empty()) open_optimizer_init();
  // Dropout uses the global generator; every rank must draw different masks.
  seed_generators(config_.model.seed + static_cast<uint64_t>(group_.rank()), device_);
}

/// Whether the model is constructed without memory for its parameters.
bool Run::defers() const {
  const bool on_cpu = config_.model.device == "cpu";
  return config_.model.deferred.value_or(on_cpu &&
                                         config_.parallel.type == "FullyShardedDataParallel");
}

/// Applies model.freeze.
void Run::freeze_parameters() {
  const auto parameters = named_parameters(*model_.module);
  for (const auto& pattern : config_.model.freeze) {
    bool found = false;
    for (auto [name, parameter] : parameters) {
      if (!detail::matches_name(pattern.c_str(), name.c_str())) continue;
      parameter.set_requires_grad(false);
      found = true;
    }
    if (!found) {
      throw UsageError(config_.at("model.freeze") + "\"" + pattern +
                       "\" matches no parameter; expected names such as " +
                       parameters.front().first);
    }
  }
  if (std::none_of(parameters.begin(), parameters.end(),
                   [](const auto& entry) { return entry.second.requires_grad(); })) {
    throw UsageError(config_.at("model.freeze") +
                     "all parameters are frozen; expected at least one that is trained");
  }
}

/// Calls the config's loss. An error in it is reported with the config's place and the shapes.
Losses Run::loss_of(const at::Tensor& prediction, const Batch& batch) const {
  try {
    return config_.loss(prediction, batch);
  } catch (const c10::Error& error) {
    std::ostringstream shapes;
    shapes << "of a prediction of shape " << prediction.sizes() << " and targets of shape "
           << batch.targets.sizes();
    const std::string type = config_.options ? config_.value("loss.type") + " " : "";
    throw Error(config_.at("loss.type") + type + shapes.str() + ": " + message_of(error));
  }
}

void Run::note_specs() {
  for (const auto& [name, parameter] : named_parameters(*model_.module)) {
    weights_.push_back({name, parameter.scalar_type(), parameter.sizes().vec()});
    parameters_ += parameter.numel();
  }
  parameter_count_ = weights_.size();
  for (const auto& buffer : model_.module->named_buffers(true)) {
    weights_.push_back({buffer.key(), buffer.value().scalar_type(), buffer.value().sizes().vec()});
  }
}

/// Refuses tensors that the files of this run cannot hold, such as those with the format's reserved
/// name. Otherwise only the first save would fail.
void Run::check_specs() const {
  const auto check = [this](const std::string& key, const std::string& file) {
    named(config_.at(key), [&] { SafetensorsWriter::check(file, weights_); });
  };
  if (store_) check("checkpoint.folder", store_->folder() + "/…/weights.safetensors");
  if (!config_.train.save.empty() && !is_torch_path(config_.train.save))
    check("train.save", config_.train.save);
}

int64_t Run::bytes_of_weights() const {
  int64_t bytes = 0;
  for (const auto& spec : weights_) {
    bytes +=
        static_cast<int64_t>(c10::elementSize(spec.dtype)) * c10::multiply_integers(spec.shape);
  }
  return bytes;
}

/// On rank 0. `with_save`: also where train.save is.
void Run::warn_of_space(int64_t bytes, const std::string& what, bool with_save) const {
  const auto warn = [&](const std::string& folder) {
    const std::string text = space_warning(folder, bytes, what);
    if (!text.empty()) reporter_->line(text);
  };
  if (!reporter_) return;
  if (store_) warn(store_->folder());
  if (with_save && !config_.train.save.empty()) {
    warn(std::filesystem::path(config_.train.save).parent_path().string());
  }
}

void Run::check_joining() const {
  if (joins() && wrapper_->joinable() == nullptr) {
    throw UsageError(config_.at("data.uneven") + "join is not supported by parallel.type " +
                     config_.parallel.type);
  }
}

void Run::make() {
  wrapper_ =
      config_.parallel.plan.make({model_, config_.preprocessor, own_group(), config_.optimizer});
  check_joining();
  if (resumed_) load_checkpoint_weights();
  else if (initial_) load_init();
  if (optimizer_init_) load_optimizer_init();
  if (config_.parallel.local_sgd) {
    sync_ = named(config_.at("parallel.local_sgd"), [&] {
      return std::make_unique<GroupSync>(*config_.parallel.local_sgd, *groups_, *wrapper_);
    });
  }
  OptimWrapperOptions options;
  options.accumulative_counts = config_.train.accumulation;
  options.clip_grad_norm = config_.train.clip_grad_norm;
  options.clip_grad_value = config_.train.clip_grad_value;
  options.clip_norm_type = config_.train.clip_norm_type;
  options.error_if_nonfinite = config_.train.error_if_nonfinite;
  options.autocast = config_.train.autocast;
  options.scaler = config_.train.loss_scale;
  options.skip_nonfinite = !config_.train.error_if_nonfinite;
  options.norm_may_follow = config_.train.on_nonfinite != "skip";
  options.before_update = [this] { return allow_update(); };
  optimizer_ = std::make_unique<OptimWrapper>(*wrapper_, options);
  for (const auto& group : wrapper_->optimizer().param_groups()) {
    base_lrs_.push_back(group.options().get_lr());
  }
  if (config_.train.on_nonfinite == "skip") {
    const auto extra = wrapper_->extra_state();
    if (!extra.empty()) {
      throw UsageError(config_.at("train.on_nonfinite") + "skip, but " + extra.front().first +
                       " of parallel.comm_hook would keep what a step left in it; expected stop, "
                       "rollback or another hook");
    }
    step_buffers_ = StepBuffers(model_.module->buffers(true));
  }
  if (config_.train.early_stop.patience > 0) {
    EarlyStopOptions stop;
    stop.patience = config_.train.early_stop.patience;
    stop.min_delta = config_.train.early_stop.min_delta;
    early_stop_.emplace(stop);
  }
  if (resumed_) {
    restore();
  } else if (config_.train.ema.decay) {
    start_averaging();
  }
}

void Run::start_averaging() {
  std::vector<at::Tensor> live;
  for (const auto& shard : wrapper_->shards()) {
    live.push_back(shard.tensor);
  }
  average_ = std::make_unique<WeightAverage>(std::move(live), *config_.train.ema.decay,
                                             WeightAverageOptions{config_.train.ema.warmup});
}

}  // namespace tessera::train
