#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <c10/core/DeviceGuard.h>

#include "tessera/join.h"
#include "tessera/step/early_stop.h"
#include "tessera/step/weight_average.h"
#include "tessera/train.h"
#include "train/run/faults.h"
#include "train/run/run_data.h"
#include "train/run/stop_requests.h"
#include "train/state/run_checkpoints.h"
#include "train/step/training_step.h"

namespace tessera::train {

/// Where a run is.
struct RunPosition {
  int64_t done = 0;             ///< iterations
  int active_ranks = 0;         ///< that have data in this one; 0: all
  std::set<int64_t> left_out;   ///< numbers of steps that are not trained
  bool evaluation_due = false;  ///< an interruption came before the evaluation of this step
  StepRecord record;            ///< of the last step
  TrainResult result;
};

/// One run on one rank. The members are in the order of their construction. In a join the run is
/// the only Joinable: a rank without data goes through the same steps and evaluations, without a
/// batch.
class Run : private Joinable {
 public:
  /// `left_out`: numbers of steps that are not trained.
  /// `heartbeat`: is told what the run does.
  Run(const Config& config, ProcessGroup group, std::set<int64_t> left_out, Heartbeat& heartbeat);
  TrainResult run();
  /// After run(): the step that is to be left out by a new run from the last sound checkpoint.
  std::optional<int64_t> rollback() const { return faults_->rollback(); }
  /// After run(): it was interrupted, and this rank got a signal.
  bool interrupted_here() const { return stops_.here(); }

 private:
  // run_prepare.cpp
  void prepare();
  void make();
  void restore();
  void start_averaging(const std::vector<at::Tensor>& averages, int64_t updates);
  SavedState state() const;

  ProcessGroup join_group() const override { return context_.group; }
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank) override {
    wrapper_->joinable()->finish_join(last_active_rank);
  }

  // run.cpp
  TrainResult run_to_end();
  void train();
  void iteration(std::optional<Batch> batch);
  void train_step(std::optional<Batch> batch);
  void compare_replicas();
  void call_hooks(void (RunHook::*call)(RunState&), const StepRecord::Figures& figures);
  std::map<std::string, double> figures_on(const Dataset& data, int64_t max_samples);
  void swap_average();
  void evaluate();
  void run_due_evaluation();
  void save_checkpoint();
  void finish();

  RunContext context_;
  c10::OptionalDeviceGuard on_device_;
  std::optional<RunCheckpoints> checkpoints_;
  std::optional<RunData> data_;
  TrainedModel model_;
  std::optional<RunWeights> weights_;
  std::vector<std::shared_ptr<RunHook>> hooks_;
  std::unique_ptr<ModelWrapper> wrapper_;
  std::optional<TrainingStep> step_;
  std::optional<Faults> faults_;
  std::unique_ptr<WeightAverage> average_;
  std::optional<EarlyStop> early_stop_;
  StopRequests stops_;
  RunPosition now_;
};

}  // namespace tessera::train
