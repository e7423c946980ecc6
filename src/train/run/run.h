#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <c10/core/DeviceGuard.h>

#include "tessera/join.h"
#include "tessera/train.h"
#include "train/run/faults.h"
#include "train/run/run_data.h"
#include "train/run/run_models.h"
#include "train/run/stop_requests.h"
#include "train/state/best_evaluations.h"
#include "train/state/run_checkpoints.h"

namespace tessera::train {

/// The source of a run's samples.
enum class RunSource {
  datasets,  ///< the config's
  program,   ///< GivenData
};

/// The position of a run.
struct RunPosition {
  int64_t done = 0;             ///< iterations
  int active_ranks = 0;         ///< that have data in this one; 0: all
  std::set<int64_t> left_out;   ///< numbers of steps that are not trained
  bool evaluation_due = false;  ///< an interruption came before the evaluation of this step
  StepRecord record;            ///< of the last step
  TrainResult result;
};

/// The parts of one run on one rank, before the first step. The members are in the order of their
/// construction. Collective unless marked "Local.".
class PreparedRun {
 public:
  const RunContext& context() const { return context_; }  ///< Local.
  RunModels& models() { return models_; }                 ///< Local.
  RunData& data() { return *data_; }                      ///< Local.
  const RunPosition& now() const { return now_; }         ///< Local.
  /// After the run: the step that a new run from the last sound checkpoint must leave out.
  std::optional<int64_t> rollback() const { return faults_->rollback(); }
  /// After the run: it was interrupted, and this rank got a signal.
  bool interrupted_here() const { return stops_.here(); }

 protected:
  PreparedRun(const Config& config, ProcessGroup group, RunSource source, Heartbeat& heartbeat);
  SavedState state() const;

  RunContext context_;
  c10::OptionalDeviceGuard on_device_;
  std::optional<RunCheckpoints> checkpoints_;
  std::unique_ptr<RunData> data_;
  RunModels models_;
  std::vector<std::shared_ptr<RunHook>> hooks_;
  std::optional<Faults> faults_;
  std::optional<BestEvaluations> best_;
  StopRequests stops_;
  RunPosition now_;

 private:
  void prepare(RunSource source);
  void make();
  void restore();
};

/// One run on one rank, step by step: begin(), iteration() for each batch, end().
class Run : public PreparedRun {
 public:
  /// `left_out`: numbers of steps that are not trained.
  /// `heartbeat`: gets the current work of the run.
  Run(const Config& config, ProcessGroup group, std::set<int64_t> left_out, Heartbeat& heartbeat,
      RunSource source = RunSource::datasets);

  /// The work before the first step: the first lines, hooks, an evaluation that is due.
  void begin();
  bool stopped() const { return stops_.stopped(); }  ///< Local.
  bool failed() const { return faults_->ended(); }   ///< end() throws. Local.
  /// True if a step follows, for which this rank loads its batch now. Local.
  bool goes_on();
  void load() { context_.heartbeat.enter(Phase::loading, now_.done); }  ///< Local.
  /// For joins: the ranks that have data in the next iteration. Local.
  void on_join(const JoinIteration& iteration);
  /// One step, and the evaluation, log line and checkpoint after it. A rank without a batch only
  /// makes the collectives of the others.
  void iteration(std::optional<Batch> batch);
  /// The end of the run, also after a fault: its files and its result, or its error.
  TrainResult end();
  /// The text of an error that all ranks have names the position of the run.
  void placing_errors(const std::function<void()>& part);
  void save_checkpoint();
  /// The next save_checkpoint() writes, also where the step has a checkpoint. Local.
  void save_again() { checkpoints_->save_again(); }

 private:
  void train_step(std::optional<Batch> batch);
  void compare_replicas();
  void call_hooks(void (RunHook::*call)(RunState&), const StepRecord::Figures& figures);
  std::map<std::string, double> figures_on(const Dataset& data, int64_t max_samples, bool test);
  void evaluate();
  void run_due_evaluation();
  void finish();
};

}  // namespace tessera::train
