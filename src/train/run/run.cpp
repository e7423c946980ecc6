#include "train/run/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"
#include "tessera/step/replicas.h"
#include "tessera/train.h"
#include "train/run/at_place.h"
#include "train/run/device_copies.h"
#include "train/run/evaluate.h"
#include "train/run/interruption.h"
#include "train/run/run_contract.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Samples [begin, begin + count) of a batch.
Batch part_of(const Batch& batch, int64_t begin, int64_t count) {
  Batch part{batch.inputs.narrow(0, begin, count),
             batch.targets.defined() ? batch.targets.narrow(0, begin, count) : at::Tensor(),
             {}};
  for (const auto& [name, tensor] : batch.extra) {
    part.extra[name] = tensor.narrow(0, begin, count);
  }
  return part;
}

}  // namespace

Progress Run::progress(int64_t iteration) const {
  Progress now;
  now.step = iteration;
  now.steps = iterations();
  const double per_epoch =
      static_cast<double>(config_.train.global_batch) / static_cast<double>(sampler_->size());
  now.epoch = static_cast<double>(iteration) * per_epoch;
  now.epochs = static_cast<double>(now.steps) * per_epoch;
  return now;
}

void Run::on_join_iteration(const JoinIteration& iteration) {
  active_ranks_ = iteration.active_ranks;
  wrapper_->joinable()->on_join_iteration(iteration);
}

RunState Run::run_state() const {
  RunState state;
  state.step = done_;
  state.steps = iterations();
  state.epoch = progress(done_).epoch;
  state.loss = record_.loss;
  state.grad_norm = record_.grad_norm;
  state.lr = record_.lr;
  state.figures = record_.figures;
  state.model = wrapper_.get();
  return state;
}

template <class Call>
void Run::call_hooks(const Call& call) {
  if (!hooks_.empty()) wrapper_->wait_for_parameters();
  for (const auto& hook : hooks_) {
    RunState state = run_state();
    heartbeat_.enter(Phase::hooks, done_);
    call(*hook, state);
    // Groups that train apart see other figures, so they agree on the end when they meet.
    if (groups_->several()) {
      stop_wanted_ |= state.stop;
    } else {
      stop_ |= state.stop;
    }
  }
}

TrainResult Run::run() {
  try {
    return run_to_end();
  } catch (const AgreedError&) {
    throw;
  } catch (const UsageError& error) {
    // fail_in_step() of another group
    if (groups_->several() && group_.ended()) throw AgreedError(error.what());
    throw;
  }
}

TrainResult Run::run_to_end() {
  report_start();
  record_start();
  call_hooks([](RunHook& hook, RunState& state) { hook.before_run(state); });
  run_due_evaluation();
  train();
  if (!ended_by_fault()) finish();
  record_end(ended_by_fault()              ? "ended by a fault"
             : result_.interrupted_by != 0 ? "interrupted"
                                           : "finished");
  if (!failure_.empty()) {
    detail::report_agreed(began_, failure_);
    throw AgreedError(failure_);
  }
  if (!rollback_) call_hooks([](RunHook& hook, RunState& state) { hook.after_run(state); });
  return std::move(result_);
}

void Run::report_start() {
  if (reporter_) {
    reporter_->line(
        config_.model.type + " with " + std::to_string(parameters_) + " parameters; " +
        data_.train->describe() +
        (data_.val ? ", evaluation on " + std::to_string(data_.val->size()) + " samples" : "") +
        "; " + config_.optimizer.type + ", parallel: " + config_.parallel.type + ", " +
        std::to_string(group_.size()) + (group_.size() == 1 ? " rank" : " ranks") + " (" +
        group_.backend_name() + ")" + (sync_ ? ", local_sgd: " + groups_->describe() : ""));
    if (resumed_) {
      reporter_->line("resuming from " + resumed_->path());
    }
  }
  result_.first_step = done_;
}

void Run::train() {
  const auto samples_of = [this](int64_t iteration) {
    const auto part = assignment_->samples(iteration, group_.rank());
    return sampler_->samples(part.first, part.count);
  };
  BatchLoaderOptions options;
  options.threads = config_.data.loader_threads;
  options.depth = config_.data.prefetch;
  loader_ = std::make_unique<BatchLoader>(data_.train, samples_of, done_,
                                          std::max(done_, iterations()), options);
  if (joins()) {
    JoinOptions join_options;
    join_options.divide_by_initial_world_size = false;  // a mean over the ranks with data
    join({static_cast<Joinable&>(*this)}, join_options, [this](JoinLoop& loop) {
      while (!stop_ && assignment_->samples(done_, group_.rank()).count > 0) {
        loop.next();
        iteration(next_batch());
      }
    });
  } else {
    while (!stop_ && done_ < iterations()) {
      iteration(next_batch());
    }
  }
}

Batch Run::next_batch() {
  heartbeat_.enter(Phase::loading, done_);
  return loader_->next();
}

/// Runs `part`, which makes collectives of own_group(). An error on which its ranks agree becomes
/// one of all groups.
void Run::in_own_group(const std::function<void()>& part) {
  if (!groups_->several()) return part();
  try {
    part();
  } catch (const AgreedError& error) {
    if (group_.ended()) throw;
    end_all_groups(error.what());
  }
}

/// One step, and the evaluation, log line and checkpoint after it. A rank without a batch only
/// takes part in the collectives of the others.
void Run::iteration(std::optional<Batch> batch) {
  record_ = StepRecord{};
  in_own_group(
      [&] { at_place(fmt::format("step {}", done_), [&] { train_step(std::move(batch)); }); });
  if (ended_by_fault()) {
    stop_ = true;
    if (reporter_) reporter_->log(record_);
    return;
  }
  ++done_;
  check_space_of_checkpoint();
  in_own_group([&] { compare_replicas(); });
  call_hooks([](RunHook& hook, RunState& state) { hook.after_step(state); });
  const int64_t every = config_.train.eval_every;
  const bool last = done_ == iterations() || (stop_ && result_.interrupted_by == 0);
  if (sync_ && last) sync_->synchronize();
  const bool evaluation = data_.val && (last || (every > 0 && done_ % every == 0));
  // After an interruption the process may be killed soon: the checkpoint is written at once and
  // records that the evaluation is due.
  evaluation_due_ = evaluation && result_.interrupted_by != 0;
  if (evaluation && !evaluation_due_) {
    evaluate();
    // It may have stopped the run early.
    if (sync_ && stop_ && !last) sync_->synchronize();
  }
  if (reporter_) {
    reporter_->log(record_);
    if (done_ == result_.first_step + 1) {
      // The wrapper has its state now. Rank 0 stands for all; the run's end has the others' bytes.
      record_memory(
          std::vector<MemoryUse>(static_cast<size_t>(own_group().size()), wrapper_->memory()));
    }
    reporter_->progress(done_, groups_->stats());
  }
  const int64_t save_every = config_.checkpoint.every;
  if (store_ && (last || stop_ || (save_every > 0 && done_ % save_every == 0))) {
    save_checkpoint();
  }
}

/// Runs the evaluation that an interruption left undone at the checkpoint's step, and rewrites the
/// step's line in the log with it.
void Run::run_due_evaluation() {
  if (!evaluation_due_) {
    return;
  }
  evaluation_due_ = false;
  evaluate();
  if (reporter_) {
    reporter_->log_again(record_);
  }
  if (stop_ || done_ == iterations()) {
    saved_at_ = -1;  // no step follows, and the last checkpoint must contain the evaluation
  }
}

std::vector<Batch> Run::parts_of(Batch batch) const {
  const int64_t parts = config_.train.accumulation;
  if (parts == 1) {
    return {std::move(batch)};
  }
  const int64_t size = batch.inputs.size(0) / parts;
  std::vector<Batch> result;
  for (int64_t i = 0; i < parts; ++i) {
    result.push_back(part_of(batch, i * size, size));
  }
  return result;
}

/// Sets the scheduled learning rate of every parameter group, computed from the group's base rate.
/// Returns the first group's.
double Run::set_learning_rates() {
  auto& groups = wrapper_->optimizer().param_groups();
  const Progress now = progress(done_);
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].options().set_lr(config_.scheduler(now, base_lrs_[g]));
  }
  return groups.front().options().get_lr();
}

void Run::train_step(std::optional<Batch> batch) {
  heartbeat_.enter(Phase::training, done_);
  const auto start = Clock::now();
  record_.step = done_;
  record_.lr = set_learning_rates();
  optimizer_->initialize_count_status(done_ * config_.train.accumulation, 0);
  figures_.clear();
  weight_ = 0;
  fault_ = Fault::none;
  std::vector<Batch> parts;
  const bool left_out = left_out_.count(done_) > 0;
  if (left_out) {
    reduce_figures();  // for a request to stop
    record_.loss = std::nan("");
  } else if (batch) {
    weight_ = weight_of(batch->inputs.size(0));
    optimizer_->set_loss_weight(weight_);
    step_buffers_.keep();
    parts = parts_of(device_copies_.to_device(std::move(*batch), device_));
    for (const auto& part : parts) {
      wrapper_->train_step(part, *optimizer_);
      if (&part != &parts.back()) add_figures();
    }
  } else {
    step_buffers_.keep();
    for (int64_t i = 0; i < config_.train.accumulation; ++i) {
      wrapper_->shadow_train_step(*optimizer_);
    }
  }
  if (sync_) sync_->step();
  if (average_ && optimizer_->updated() && !left_out) {
    average_->update();
  }
  record_.grad_norm =
      optimizer_->skipped() || left_out ? std::nan("") : std::fabs(optimizer_->grad_norm());
  record_.loss_scale = optimizer_->scaler().scale();
  result_.skipped_steps += optimizer_->skipped() && !left_out;
  if (!left_out) handle_fault(parts);
  heartbeat_.end_step();
  const double seconds = seconds_since(start);
  record_.ms = seconds * 1000;
  record_.epoch = progress(done_ + 1).epoch;
  const int64_t round = assignment_->per_iteration();
  record_.samples = std::min(assignment_->total - assignment_->assigned_before(done_), round);
  record_.tokens = record_.samples * data_.train->tokens_per_sample();
  result_.losses.push_back(record_.loss);
  result_.grad_norms.push_back(record_.grad_norm);
  if (reporter_) {
    reporter_->step(record_, iterations());
  }
}

/// After the first step, when the optimizer has its state.
void Run::check_space_of_checkpoint() const {
  if (!store_ || !reporter_ || done_ != result_.first_step + 1) return;
  // Rank 0's memory stands for that of each rank.
  const std::vector<MemoryUse> ranks(static_cast<size_t>(own_group().size()), wrapper_->memory());
  const MemoryUse whole = wrapper_->unsharded(ranks);
  const int64_t averages = average_ ? whole.parameters : 0;
  warn_of_space(bytes_of_weights() + whole.optimizer_state + averages,
                "a checkpoint with the optimizer's state takes", false);
}

/// Ranks that are to hold the same values can drift apart by a fault of memory or by code that
/// writes to one rank's parameters.
void Run::compare_replicas() {
  const int64_t every = config_.train.check_replicas;
  const ProcessGroup& group = own_group();
  if (every == 0 || done_ % every != 0 || group.size() == 1) return;
  std::string repaired;
  try {
    // Other options are the cause of other parameters, so they are compared first.
    ProcessGroup own = group;
    check_same_options(config_, wrapper_->optimizer(), own);
    repaired = check_replicas(wrapper_->replicas(), group, config_.train.repair_replicas);
  } catch (const AgreedError& error) {
    throw AgreedError(fmt::format("{}after step {}: {}", config_.at("train.check_replicas"),
                                  done_ - 1, error.what()));
  }
  if (reporter_ && !repaired.empty()) {
    reporter_->line(fmt::format("warning: after step {}: {}; repaired", done_ - 1, repaired));
  }
}

/// The weight of this rank's loss in the mean over the ranks with data. In the last iteration of a
/// join a rank may have fewer samples than the others.
double Run::weight_of(int64_t samples) const {
  if (!joins()) return 1;
  const int64_t all = std::min(assignment_->total - assignment_->assigned_before(done_),
                               assignment_->per_iteration());
  return static_cast<double>(samples * active_ranks_) / static_cast<double>(all);
}

/// Adds the figures of one micro-batch of this rank to those of the step.
void Run::add_figures() {
  const auto& values = wrapper_->figures();
  const auto share = 1 / static_cast<double>(config_.train.accumulation);
  const auto numbers = read_figures(values);
  figures_.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    figures_[i].first = values[i].first;
    figures_[i].second += numbers[i] * share;
  }
}

void Run::reduce_figures() {
  const int signal = stop_requested();
  // The first figure is the total loss.
  std::vector<double> sums{weight_ > 0 ? weight_ * figures_.front().second : 0.0};
  for (const int each : kStopSignals) sums.push_back(signal == each ? 1 : 0);
  // In a join a rank without data does not know the figures.
  const bool all_have_figures = !joins();
  if (all_have_figures) {
    for (const auto& [name, value] : figures_) {
      sums.push_back(value);
    }
  }
  ProcessGroup group = own_group();
  const at::Tensor sum = at::tensor(sums, at::kDouble).to(group.control_device());
  group.all_reduce(sum, 1, "figures of the step");
  const at::Tensor total = sum.cpu();
  const double* values = total.data_ptr<double>();
  const double count = active_ranks_ > 0 ? active_ranks_ : group.size();
  record_.loss = values[0] / count;
  if (std::isnan(record_.loss)) record_.loss = std::nan("");  // its sign says nothing
  const double* figures = values + 1 + kStopSignals.size();
  note_stop_requests({values + 1, figures});
  for (size_t i = 0; all_have_figures && i < figures_.size(); ++i) {
    record_.figures.emplace_back(figures_[i].first, figures[i] / count);
  }
}

/// `ranks`: for each of kStopSignals, how many ranks of own_group() got it. Groups that train apart
/// stop only where they meet.
void Run::note_stop_requests(std::vector<double> ranks) {
  if (groups_->several()) {
    if (!sync_->meets_after(done_ + 1)) return;
    ranks.push_back(stop_wanted_ ? 1 : 0);
    const at::Tensor sum = at::tensor(ranks, at::kDouble).to(group_.control_device());
    group_.all_reduce(sum, 1, "requests to stop");
    const at::Tensor total = sum.cpu();
    ranks.assign(total.data_ptr<double>(), total.data_ptr<double>() + total.numel());
    stop_ = stop_ || ranks.back() > 0;
    ranks.pop_back();
  }
  const auto asked = std::find_if(ranks.begin(), ranks.end(), [](double n) { return n > 0; });
  if (asked == ranks.end()) return;
  stop_ = true;
  interrupted_here_ = interrupted_here_ || stop_requested() != 0;
  result_.interrupted_by = kStopSignals[static_cast<size_t>(asked - ranks.begin())];
}

/// Calls `evaluation` while the model has the averaged weights, if there is an average.
void Run::evaluate_averaged(const std::function<void()>& evaluation) {
  const torch::NoGradGuard no_grad;
  const auto swap = [&] {
    if (average_) {
      wrapper_->before_shard_writes();
      average_->swap();
      wrapper_->publish_shards();
    }
  };
  at_place(fmt::format("evaluation after {} steps", done_), [&] {
    swap();
    evaluation();
    swap();
  });
}

/// Each group evaluates its own parameters; the result is the mean over the groups.
std::map<std::string, double> Run::figures_on(const Dataset& data, int64_t max_samples) {
  return groups_->mean(train::evaluate(*wrapper_, data, max_samples,
                                       [&] { heartbeat_.enter(Phase::evaluating, done_); }));
}

void Run::evaluate() {
  if (!data_.val) {
    return;
  }
  evaluate_averaged([&] {
    result_.eval_figures =
        figures_on(*data_.val, config_.train.eval_batches * config_.train.global_batch);
  });
  const double loss = result_.eval_figures.at("loss");
  result_.eval_loss = loss;
  if (std::isfinite(loss) && loss < result_.best_eval_loss.value_or(INFINITY)) {
    result_.best_eval_loss = loss;
  }
  record_.evaluation.assign(result_.eval_figures.begin(), result_.eval_figures.end());
  if (reporter_) {
    reporter_->evaluation(done_, result_.eval_figures, result_.baseline_loss, data_.baseline_name);
  }
  call_hooks([&](RunHook& hook, RunState& state) {
    state.figures = record_.evaluation;
    hook.after_evaluation(state);
  });
  if (early_stop_ && early_stop_->observe(loss) && !stop_) {
    stop_ = true;
    if (reporter_) {
      reporter_->line("early stop: no improvement in " +
                      std::to_string(config_.train.early_stop.patience) + " evaluations");
    }
  }
}

}  // namespace tessera::train
