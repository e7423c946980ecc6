#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <c10/core/DeviceGuard.h>

#include "tessera/checkpoint_store.h"
#include "tessera/data/batch_loader.h"
#include "tessera/join.h"
#include "tessera/optim/torch_optimizer_state.h"
#include "tessera/safetensors.h"
#include "tessera/step/agreement.h"
#include "tessera/step/early_stop.h"
#include "tessera/step/weight_average.h"
#include "tessera/train.h"
#include "tessera/train/model_wrapper.h"
#include "tessera/train/optim_wrapper.h"
#include "train/groups/group_sync.h"
#include "train/groups/training_groups.h"
#include "train/report/reporter.h"
#include "train/run/device_copies.h"
#include "train/run/sample_assignment.h"
#include "train/run/step_buffers.h"
#include "train/watch/heartbeat.h"

namespace tessera::train {

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
  std::optional<int64_t> rollback() const { return rollback_; }
  /// After run(): it was interrupted, and this rank got a signal.
  bool interrupted_here() const { return interrupted_here_; }

 private:
  using Figures = std::vector<std::pair<std::string, double>>;
  enum class Fault { none, loss, gradient, spike };

  bool first() const { return group_.rank() == 0; }
  /// The ranks that train together in every step.
  const ProcessGroup& own_group() const { return groups_->inner(); }
  bool uneven() const { return config_.train.global_batch % group_.size() != 0; }
  bool joins() const { return uneven() && config_.data.uneven == "join"; }
  int64_t iterations() const {
    return joins() ? assignment_->all_iterations() : assignment_->full_iterations();
  }
  Progress progress(int64_t iteration) const;

  // run_prepare.cpp: local, except make(); an error on one rank is thrown on all
  void choose_device();
  void prepare();
  void load_data();
  void make_model(const ProcessGroup& own_group);
  Losses loss_of(const at::Tensor& prediction, const Batch& batch) const;
  bool defers() const;
  void freeze_parameters();
  void note_specs();
  void check_specs() const;
  void make();
  void warn_of_space(int64_t bytes, const std::string& what, bool with_save) const;
  int64_t bytes_of_weights() const;
  void start_averaging();
  void check_joining() const;

  ProcessGroup join_group() const override { return group_; }
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override {
    heartbeat_.enter(Phase::loading, done_);
    iteration(std::nullopt);
  }
  void finish_join(int last_active_rank) override {
    wrapper_->joinable()->finish_join(last_active_rank);
  }

  // run.cpp
  TrainResult run_to_end();
  void report_start();
  void train();
  Batch next_batch();
  void in_own_group(const std::function<void()>& part);
  void iteration(std::optional<Batch> batch);
  void train_step(std::optional<Batch> batch);
  void compare_replicas();
  void check_space_of_checkpoint() const;
  std::vector<Batch> parts_of(Batch batch) const;
  void add_figures();
  /// Computes means over the ranks of own_group() with a batch, and whether any rank received a
  /// stop request.
  void reduce_figures();
  void note_stop_requests(std::vector<double> ranks);
  double weight_of(int64_t samples) const;
  double set_learning_rates();
  std::map<std::string, double> figures_on(const Dataset& data, int64_t max_samples);
  void evaluate();
  void run_due_evaluation();
  void evaluate_averaged(const std::function<void()>& evaluation);
  RunState run_state() const;
  template <class Call>
  void call_hooks(const Call& call);
  void finish();
  void report_memory();
  void record_start();
  void record_memory(const std::vector<MemoryUse>& ranks);
  void record_end(const std::string& outcome);
  void sample();

  // run_nonfinite.cpp
  bool ended_by_fault() const { return rollback_ || !failure_.empty(); }
  bool allow_update();
  void handle_fault(const std::vector<Batch>& parts);
  std::string origin_of_fault(const std::vector<Batch>& parts);
  std::string origin_of_loss(const std::vector<Batch>& parts);
  std::string origin_of_gradient(const std::vector<Batch>& parts);
  void roll_back(const std::string& reason);
  void fail(const std::string& reason);
  void fail_in_step(const std::string& reason);
  [[noreturn]] void end_all_groups(const std::string& reason);
  std::string nonfinite_parameter(ProcessGroup group);
  void warn(const std::string& text) const;
  void check_checkpoint();
  void check_parameters();
  void end_after_update(const std::string& origin);

  // run_checkpoint.cpp
  void open_checkpoints();
  std::string open_checkpoint(const std::string& path);
  std::string set_aside_damaged(const std::string& path, const std::string& why);
  void restore();
  void save_checkpoint();
  std::vector<StateSlice> slices_to_save();
  void restore_slices(const Checkpoint& checkpoint);
  void restore_random(const Checkpoint& checkpoint);
  void restore_sync();
  int groups_in_checkpoint() const;
  std::string state_text() const;
  void read_state(const std::string& text, const std::string& where);
  void check_global_batch(int64_t before) const;
  void check_model(const std::map<std::string, std::string>& before) const;
  void warn_of_optimizer(const std::string& before);

  // run_weights.cpp
  at::Tensor whole_weight(size_t i, int to);
  void add_weights_to(CheckpointWriter& writer);
  void open_checkpoint_weights();
  void load_checkpoint_weights();
  void open_init();
  void load_init();
  void skip_initial_values();
  void load_initial();
  void report_unmatched(const UnmatchedNames& names) const;
  void open_optimizer_init();
  void load_optimizer_init();
  std::vector<std::string> names_for_python(const std::vector<size_t>& group_sizes) const;
  void report_other_options() const;
  void save_optimizer();
  void save();

  const Config& config_;
  ProcessGroup group_;  // all ranks
  Heartbeat& heartbeat_;
  at::Device device_ = at::kCPU;  // of the model
  c10::OptionalDeviceGuard on_device_;
  DeviceCopies device_copies_;            // of batches
  std::optional<TrainingGroups> groups_;  // always there after the first checks
  std::optional<CheckpointStore> store_;
  std::optional<Checkpoint> resumed_;
  DataSplits data_;
  std::optional<Sampler> sampler_;
  std::optional<SampleAssignment> assignment_;
  TrainedModel model_;
  std::unique_ptr<TensorSource> initial_;  // the checkpoint's weights, or model.init; until loaded
  WeightsMatch initial_names_;
  std::optional<TorchOptimizerStateFile> optimizer_init_;  // optimizer.init, until it is loaded
  std::vector<std::string> optimizer_names_;               // of the parameters in it
  std::vector<SafetensorsSpec> weights_;                   // parameters, then buffers
  size_t parameter_count_ = 0;                             // of weights_
  int64_t parameters_ = 0;                                 // elements
  std::unique_ptr<Reporter> reporter_;                     // rank 0
  std::vector<std::shared_ptr<RunHook>> hooks_;
  std::unique_ptr<ModelWrapper> wrapper_;
  std::unique_ptr<GroupSync> sync_;  // with parallel.local_sgd
  std::unique_ptr<OptimWrapper> optimizer_;
  std::unique_ptr<WeightAverage> average_;
  std::optional<EarlyStop> early_stop_;
  std::unique_ptr<BatchLoader> loader_;
  std::vector<double> base_lrs_;  // learning rates of the parameter groups before the schedule
  int64_t done_ = 0;              // iterations
  int64_t saved_at_ = -1;
  int64_t averaged_updates_ = 0;  // updates of the average in the checkpoint
  int active_ranks_ = 0;          // 0: all
  std::set<int64_t> left_out_;
  Figures figures_;            // of this rank in this step
  double weight_ = 0;          // of this rank's figures
  Fault fault_ = Fault::none;  // of this step
  int64_t skips_in_a_row_ = 0;
  std::deque<double> recent_losses_;       // of good steps
  StepBuffers step_buffers_;               // with train.on_nonfinite: skip
  std::string failure_;                    // ends the run with an error
  nlohmann::ordered_json saved_groups_;    // of sync_, in the checkpoint that is written
  nlohmann::ordered_json resumed_groups_;  // the same of the one that the run resumes from
  int resumed_group_ = 0;                  // its group from which this rank's goes on
  std::vector<int> began_;  // the ranks where something is not finite; empty: unknown
  std::optional<int64_t> rollback_;
  bool stop_ = false;
  bool stop_wanted_ = false;  // by a hook of this rank
  bool interrupted_here_ = false;
  bool evaluation_due_ = false;  // an interruption came before the evaluation of this step
  StepRecord record_;
  TrainResult result_;
};

}  // namespace tessera::train
