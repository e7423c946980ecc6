#pragma once

#include <string>
#include <vector>

#include "train/run/run_data.h"

namespace tessera::train {

/// The samples that a program gives in each step. The ranks may have different numbers of samples,
/// and some may have none. Local.
class GivenData final : public RunData {
 public:
  /// UsageError if the config has datasets, or options that need them.
  explicit GivenData(const RunContext& context);

  /// The numbers of samples of the ranks in the next step.
  void set_counts(const std::vector<int64_t>& counts);
  int active_ranks() const { return active_; }  ///< with samples

  std::string describe() const override { return "samples from the program"; }
  int64_t tokens_per_sample() const override { return 0; }
  bool joins() const override { return active_ < ranks_; }
  int64_t iterations() const override;
  Progress progress(int64_t iteration) const override { return {iteration, iterations(), 0, 0}; }
  int64_t samples_in(int64_t) const override { return total_; }
  double weight_of(int64_t samples, int active_ranks, int64_t iteration) const override;
  SamplerState state(int64_t iteration) const override;
  void load_state(const SamplerState& state, int64_t iteration) override;
  void start(int64_t) override {}

 private:
  const int ranks_;  // that train together
  int active_ = 0;
  int64_t total_ = 0;     // samples of the step
  int64_t position_ = 0;  // samples of all steps
};

}  // namespace tessera::train
