#include "train/run/run.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include <fmt/format.h>

#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/step/replicas.h"
#include "train/run/evaluate.h"
#include "train/run/run_contract.h"
#include "train/run/run_records.h"

namespace tessera::train {
namespace {

/// A collective knows its number, but not the work that it belongs to. Errors of other components
/// stay as they are.
std::string placed(const Error& error, const Heartbeat& heartbeat) {
  const std::string text = error.what();
  if (text.rfind("ProcessGroup", 0) != 0) return text;
  return fmt::format("step {}, {}: {}", heartbeat.step(), name_of(heartbeat.phase()), text);
}

}  // namespace

Run::Run(const Config& config, ProcessGroup group, std::set<int64_t> left_out, Heartbeat& heartbeat,
         RunSource source)
    : PreparedRun(config, std::move(group), source, heartbeat) {
  now_.left_out.merge(left_out);
}

void Run::placing_errors(const std::function<void()>& part) {
  const Heartbeat& heartbeat = context_.heartbeat;
  try {
    part();
  } catch (const BrokenWorldError& error) {
    throw BrokenWorldError(placed(error, heartbeat), error.ranks());
  } catch (const AgreedError& error) {
    const std::string text = placed(error, heartbeat);
    if (heartbeat.phase() == Phase::training) context_.groups->end_all(text, faults_->ranks());
    throw AgreedError(text);
  } catch (const UsageError& error) {
    if (context_.groups->ended()) throw AgreedError(placed(error, heartbeat));
    throw UsageError(placed(error, heartbeat));
  }
}

void Run::begin() {
  report_start(context_, *data_, models_.weights(), checkpoints_->resumed(), now_.done);
  now_.result.first_step = now_.done;
  if (best_->has_stopped()) {
    stops_.stop();
    context_.say("early stop: the run has ended; a larger train.early_stop.patience continues it");
  }
  call_hooks(&RunHook::before_run, now_.record.figures);
  run_due_evaluation();
  data_->start(now_.done);
}

bool Run::goes_on() {
  if (stops_.stopped() || now_.done >= data_->iterations()) return false;
  load();
  return true;
}

void Run::on_join(const JoinIteration& iteration) {
  now_.active_ranks = iteration.active_ranks;
  models_.whole().joinable()->on_join_iteration(iteration);
}

TrainResult Run::end() {
  if (!faults_->ended()) finish();
  record_end(context_, *data_,
             faults_->ended()       ? "ended by a fault"
             : stops_.signal() != 0 ? "interrupted"
                                    : "finished",
             now_.result.first_step, now_.done);
  if (!faults_->failure().empty()) {
    detail::report_agreed(faults_->ranks(), faults_->failure());
    throw AgreedError(faults_->failure());
  }
  if (!faults_->rollback()) call_hooks(&RunHook::after_run, now_.record.figures);
  return std::move(now_.result);
}

void Run::iteration(std::optional<Batch> batch) {
  train_step(std::move(batch));
  if (faults_->ended()) {
    stops_.stop();
    if (context_.reporter) context_.reporter->log(now_.record);
    return;
  }
  const int64_t done = ++now_.done;
  const bool first = done == now_.result.first_step + 1;  // the optimizer has its state now
  if (first && checkpoints_->write() && context_.reporter)
    warn_of_space(context_, models_.weights().bytes(true) + models_.state_bytes(),
                  "a checkpoint with the optimizer's state takes", false);
  compare_replicas();
  call_hooks(&RunHook::after_step, now_.record.figures);
  const auto due = [done](int64_t every) { return every > 0 && done % every == 0; };
  const bool interrupted = stops_.signal() != 0;
  const bool last = done == data_->iterations() || (stops_.stopped() && !interrupted);
  if (last) context_.groups->synchronize();
  const bool evaluation = data_->splits().val && (last || due(context_.config.train.eval.every));
  // After an interruption the process may be killed soon: the checkpoint is written at once and
  // records that the evaluation is due.
  now_.evaluation_due = evaluation && interrupted;
  if (evaluation && !interrupted) {
    evaluate();
    // It may have stopped the run early.
    if (stops_.stopped() && !last) context_.groups->synchronize();
  }
  if (context_.reporter) {
    context_.reporter->log(now_.record);
    if (first) record_memory(context_, models_, done);
    context_.reporter->progress(done, context_.groups->stats());
  }
  if (last || stops_.stopped() || best_->keeps(done) || due(context_.config.checkpoint.every))
    save_checkpoint();
}

void Run::train_step(std::optional<Batch> batch) {
  Heartbeat& heartbeat = context_.heartbeat;
  heartbeat.enter(Phase::training, now_.done);
  const auto start = std::chrono::steady_clock::now();
  StepInput input;
  input.left_out = now_.left_out.count(now_.done) > 0;
  models_.begin_step(now_.done);
  input.ranks_with_data = now_.active_ranks;
  input.flags = [this] { return stops_.flags(); };
  faults_->begin_step();
  if (batch && !input.left_out) {
    input.weight = data_->weight_of(batch->inputs.size(0), now_.active_ranks, now_.done);
    input.parts = data_->parts_of(std::move(*batch));
  }
  StepResult result =
      models_.step().run(data_->progress(now_.done), input, faults_->policy(), !data_->joins());
  if (context_.groups->end_step(result.sums, now_.done + 1)) stops_.stop();
  stops_.note(result.sums);
  models_.end_step(result);
  StepRecord& record = now_.record = result.record;
  record.step = now_.done;
  now_.result.skipped_steps += !result.updated && !input.left_out;
  if (!input.left_out) faults_->end_step(now_.done, input, result);
  heartbeat.end_step();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  record.ms = seconds.count() * 1000;
  record.epoch = data_->progress(now_.done + 1).epoch;
  record.samples = data_->samples_in(now_.done);
  record.tokens = record.samples * data_->tokens_per_sample();
  now_.result.losses.push_back(record.loss);
  now_.result.grad_norms.push_back(record.grad_norm);
  if (context_.reporter) context_.reporter->step(record, data_->iterations());
}

/// Ranks that are to hold the same values can drift apart by a fault of memory or by code that
/// writes to one rank's parameters.
void Run::compare_replicas() {
  const Config& config = context_.config;
  const int64_t every = config.train.check_replicas;
  ProcessGroup group = context_.own_group();
  if (every == 0 || now_.done % every != 0 || group.size() == 1) return;
  std::string repaired;
  try {
    // Other options are the cause of other parameters, so they are compared first.
    for (const auto& model : models_.each())
      check_same_options(model.own, model.wrapper->optimizer(), group);
    repaired = check_replicas(models_.whole().replicas(), group, config.train.repair_replicas);
  } catch (const AgreedError& error) {
    throw AgreedError(fmt::format("{}after step {}: {}", config.at("train.check_replicas"),
                                  now_.done - 1, error.what()));
  }
  if (repaired.empty()) return;
  context_.say(fmt::format("warning: after step {}: {}; repaired", now_.done - 1, repaired));
}

void Run::call_hooks(void (RunHook::*call)(RunState&), const StepRecord::Figures& figures) {
  if (!hooks_.empty()) models_.whole().wait();
  for (const auto& hook : hooks_) {
    RunState state;
    state.step = now_.done;
    state.steps = data_->iterations();
    state.epoch = data_->progress(now_.done).epoch;
    state.loss = now_.record.loss;
    state.grad_norm = now_.record.grad_norm;
    state.lr = now_.record.lr;
    state.figures = figures;
    state.model = &models_.whole();
    for (const auto& model : models_.each()) state.models[model.own.name] = model.wrapper.get();
    context_.heartbeat.enter(Phase::hooks, now_.done);
    (*hook.*call)(state);
    if (state.stop && context_.groups->ask_to_stop()) stops_.stop();
  }
}

/// Each group evaluates its own parameters; the result is the mean over the groups.
std::map<std::string, double> Run::figures_on(const Dataset& data, int64_t max_samples, bool test) {
  const auto begin_round = [this] { context_.heartbeat.enter(Phase::evaluating, now_.done); };
  begin_round();
  const torch::NoGradGuard no_grad;
  const auto wants = [](const auto& hook) { return hook->wants_predictions(); };
  const Config& config = context_.config;
  const EvaluateOptions options{max_samples, config.train.eval.batch, config.metrics,
                                std::any_of(hooks_.begin(), hooks_.end(), wants)};
  const auto on_batch = [&](int64_t first, const Evaluated& batch) {
    // Group 0 has the weights that are saved.
    for (const auto& hook : hooks_)
      if (context_.groups->first()) hook->on_predictions({first, batch, test});
  };
  models_.swap_averages();
  const auto figures =
      context_.groups->mean(train::evaluate(models_.whole(), data, options, begin_round, on_batch));
  models_.swap_averages();
  return figures;
}

void Run::evaluate() {
  const RunConfig& config = context_.config.train;
  const DataSplits& splits = data_->splits();
  if (!splits.val) return;
  TrainResult& result = now_.result;
  result.eval_figures = figures_on(*splits.val, config.eval.batches * config.global_batch, false);
  const double loss = result.eval_figures.at("loss");
  result.eval_loss = loss;
  if (std::isfinite(loss) && loss < result.best_eval_loss.value_or(INFINITY))
    result.best_eval_loss = loss;
  now_.record.evaluation.assign(result.eval_figures.begin(), result.eval_figures.end());
  if (context_.reporter)
    context_.reporter->evaluation(now_.done, result.eval_figures, result.baseline_loss,
                                  splits.baseline_name);
  call_hooks(&RunHook::after_evaluation, now_.record.evaluation);
  const auto verdict = best_->observe(now_.done, result.eval_figures);
  if (verdict.best_weights) {
    ModelWrapper& whole = models_.whole();
    auto weights = models_.averages();
    const auto shards = whole.shards();
    for (size_t i = 0; i < shards.size(); ++i)
      if (!weights[i].defined()) weights[i] = shards[i].tensor;
    best_->take_weights(weights, *whole.model().module);
  }
  if (verdict.stop && !stops_.stopped()) {
    stops_.stop();
    context_.say(
        fmt::format("early stop: no improvement in {} evaluations", config.early_stop.patience));
  }
}

/// Runs the evaluation that an interruption left undone at the checkpoint's step, and rewrites the
/// step's line in the log with it.
void Run::run_due_evaluation() {
  if (!now_.evaluation_due) return;
  now_.evaluation_due = false;
  evaluate();
  if (context_.reporter) context_.reporter->log_again(now_.record);
  // If no step follows, or the checkpoint is one of the best, it must contain the evaluation.
  const bool best = best_->keeps(now_.done);
  if (best || stops_.stopped() || now_.done == data_->iterations()) save_again();
  if (best) save_checkpoint();
}

void Run::save_checkpoint() {
  if (!checkpoints_->write()) return;
  const auto path =
      checkpoints_->save(now_.done, [this] { return state(); },
                         {models_.whole(), models_.weights(), models_.averages(), *best_});
  if (path.empty()) return;
  now_.result.checkpoint = path;
  faults_->check_checkpoint(path, models_.weights().buffer_names(), now_.done);
  if (faults_->ended()) stops_.stop();
}

void Run::finish() {
  TrainResult& result = now_.result;
  const int64_t done = now_.done;
  context_.heartbeat.enter(Phase::finishing, done);
  result.interrupted_by = stops_.signal();
  const bool interrupted = result.interrupted_by != 0;
  if (interrupted) {
    context_.say(fmt::format("interrupted at step {}{}", done,
                             result.checkpoint.empty()
                                 ? "; no checkpoint.folder, nothing to resume from"
                                 : "; the same command resumes from " + result.checkpoint));
    request_stop(0);
    if (checkpoints_->write()) return;
  }
  if (!result.losses.empty()) faults_->check_parameters(done);
  if (faults_->ended()) return;
  if (!interrupted && result.eval_figures.empty()) {
    now_.record.step = done;
    evaluate();
  }
  save_checkpoint();
  if (faults_->ended()) return;
  if (const auto step = best_->give_weights(models_.whole())) {
    models_.drop_averages();  // the best weights are averaged ones
    context_.say(
        fmt::format("early_stop: from here on the weights are those after {} steps, of "
                    "the best evaluation",
                    *step));
  }
  if (data_->splits().test && !interrupted) {
    const auto figures = figures_on(*data_->splits().test, 0, true);
    if (context_.reporter) context_.reporter->test(figures);
    call_hooks(&RunHook::after_test, {figures.begin(), figures.end()});
  }
  report_memory(context_, models_, done);
  const torch::NoGradGuard no_grad;
  models_.swap_averages();
  models_.save(done);
  context_.heartbeat.enter(Phase::finishing, done);
  print_sample(context_, models_.whole());
  models_.swap_averages();
  if (context_.reporter)
    context_.reporter->summary(result, context_.groups->stats(), data_->waited());
}

}  // namespace tessera::train
