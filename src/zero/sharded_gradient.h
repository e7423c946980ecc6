#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sharding/detection/gradient_placeholders.h"
#include "zero/gradient_shards.h"
#include "zero/mean_gradient.h"

namespace tessera::zero {

/// Gradients of which a rank keeps only its own part of the mean: [Note: sharded gradients].
/// `.grad` of the shards is that part until zero_grad(), as with a plain optimizer.
class ShardedGradient : public MeanGradient {
 public:
  ShardedGradient(ProcessGroup group, sharding::GradientWire& wire, Shards& shards,
                  const ZeroRedundancyOptimizerOptions& options, std::string prefix);
  ~ShardedGradient() override { reducer_.reset(); }

  void hold_sync(int change) override;
  /// Adds the gradients that no_sync() has kept. Without a backward since the last step, also adds
  /// gradients that the caller has set.
  void average() override;
  void begin_update() override { average(); }
  bool averaged() const override { return true; }
  bool used(size_t parameter) const override { return sums_.used(parameter); }
  /// None of the `.grad`s is a placeholder, and gradients whose placeholder the program has removed
  /// are cleared.
  void hide_placeholders() override;
  void reset() override { used_up_ = true; }
  bool edited() override { return sums_.any() && versions() != versions_; }
  void clear(bool set_to_none) override;
  bool shadow() override;

 private:
  void begin() override { hide_placeholders(); }
  void start(size_t b) override;
  void finish() override { sums_.wait(); }
  void finished() override;
  void abandon() override { sums_.wait(); }
  void drop_sums() override { placeholders_.reset(); }
  void add_to(sharding::ReducerOptions& options, bool first) override;
  void watched(const std::vector<sharding::NamedTensor>& trainable, bool first) override;
  bool has_bucket(size_t b) const override;
  bool is_shown(size_t parameter) const {
    return placeholders_ && placeholders_->shown(position_[parameter]);
  }
  void show_placeholders();
  uint64_t versions();
  void zero_own_part(size_t parameter);

  GradientShards sums_;
  /// Of `.grad` of the parameters while their gradients are in sums_; by position.
  std::unique_ptr<sharding::GradientPlaceholders> placeholders_;
  bool held_ = false;            // under no_sync(), or before a new watch, since the last reduction
  bool used_up_ = false;         // a step has used sums_, and no backward has added to them since
  bool clears_to_zero_ = false;  // the program keeps gradients of zero
  uint64_t versions_ = 0;        // of the segments at the end of the last reduction
};

}  // namespace tessera::zero
