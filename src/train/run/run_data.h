#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/data/batch_loader.h"
#include "tessera/step/lr_scheduler.h"
#include "train/run/sample_assignment.h"
#include "train/state/run_context.h"
#include "train/step/device_copies.h"

namespace tessera::train {

/// The data of a run: the samples of this rank in each iteration, and their batches. Local.
class RunData {
 public:
  /// Loads the data. UsageError, with the place in the config, for data that give no step.
  explicit RunData(const RunContext& context);
  virtual ~RunData() = default;

  const DataSplits& splits() const { return splits_; }
  virtual std::string describe() const { return splits_.train->describe(); }
  virtual int64_t tokens_per_sample() const { return splits_.train->tokens_per_sample(); }
  /// True if a rank may be without data in an iteration in which others have some.
  virtual bool joins() const { return uneven() && config_.data.uneven == "join"; }
  virtual int64_t iterations() const {
    return joins() ? assignment_->all_iterations() : assignment_->full_iterations();
  }
  virtual Progress progress(int64_t iteration) const;
  /// Samples of all ranks in an iteration.
  virtual int64_t samples_in(int64_t iteration) const {
    return std::min(assignment_->total - assignment_->assigned_before(iteration),
                    assignment_->per_iteration());
  }
  bool has_samples(int64_t iteration) const {  ///< of this rank
    return assignment_->samples(iteration, rank_).count > 0;
  }
  /// The weight of this rank's loss in the mean over the ranks with data. In the last iteration of
  /// a join a rank may have fewer samples than the others.
  virtual double weight_of(int64_t samples, int active_ranks, int64_t iteration) const;

  virtual SamplerState state(int64_t iteration) const;
  virtual void load_state(const SamplerState& state, int64_t iteration);

  /// Begins to load the batches from `iteration` on.
  virtual void start(int64_t iteration);
  Batch next() { return loader_->next(); }  ///< of this rank
  /// The micro-batches of a batch, on the model's device.
  std::vector<Batch> parts_of(Batch batch);
  double waited() const { return loader_ ? loader_->waited() : 0; }  ///< seconds, in next()

 protected:
  /// Without datasets.
  RunData(const RunContext& context, std::nullopt_t);

  const Config& config_;
  const int rank_, world_;

 private:
  bool uneven() const { return config_.train.global_batch % world_ != 0; }
  int64_t steps() const;

  const at::Device device_;
  DataSplits splits_;
  std::optional<Sampler> sampler_;
  std::optional<SampleAssignment> assignment_;
  DeviceCopies copies_;
  std::unique_ptr<BatchLoader> loader_;
};

}  // namespace tessera::train
