#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/early_reduction.h"
#include "zero/mean_gradient.h"

namespace tessera::zero {

/// Gradients that accumulate on their rank until step(). Their mean is taken there, or for
/// clipping, or provisionally within backward: [Note: reduction within backward].
class StepGradient : public MeanGradient {
 public:
  /// `early`: reductions begin within backward.
  StepGradient(ProcessGroup group, sharding::GradientWire& wire, bool early, Shards& shards,
               const ZeroRedundancyOptimizerOptions& options, std::string prefix);
  ~StepGradient() override { reducer_.reset(); }

  void average() override;
  void begin_update() override;
  bool averaged() const override { return averaged_; }
  bool used(size_t parameter) const override;
  void require_local(const std::string& change) const override;
  void reset() override;

  /// See TrainerAccess. Local; every rank calls it.
  void use_up_gradients() { in_buckets_ = !early_; }

  // Between begin_update() and end_update(), where the gradients were not averaged before. All are
  // collective.
  /// Calls `consume` with the runs of this rank's part of the sum of bucket `b`, in order.
  void reduce(size_t b, const std::function<void(int64_t offset, const at::Tensor& run)>& consume);
  /// Averages bucket `b` into segment(b).
  void reduce_to_segment(size_t b);
  /// All buckets are reduced: `.grad` of used parameters becomes the buckets' values.
  void end_update();
  /// After the step: the next backward may reduce.
  void begin_round();

 private:
  void begin() override;
  void start(size_t b) override;
  bool changed(size_t b) override { return early_->changed(b, flat(b)); }
  void drop_sums() override;
  void add_to(sharding::ReducerOptions& options, bool first) override;
  void watched(const std::vector<sharding::NamedTensor>& trainable, bool first) override;
  bool has_bucket(size_t /*b*/) const override { return true; }
  bool has_segment(size_t b) const override {
    return MeanGradient::has_segment(b) && !in_place_[b];
  }
  at::Tensor early_sum(size_t b);
  std::string follow_changes();
  void check_current();
  void copy_from_caller(size_t b);

  std::optional<EarlyReduction> early_;
  bool averaged_ = false;
  // `.grad`s and their versions when they were averaged, of all parameters in buckets.
  std::vector<std::pair<at::Tensor, int64_t>> averaged_from_;
  bool outdated_ = false;       // a backward has added to them since
  bool in_buckets_ = false;     // the mean may replace own gradients
  std::vector<char> in_place_;  // by bucket: the segment is part of the bucket
};

}  // namespace tessera::zero
