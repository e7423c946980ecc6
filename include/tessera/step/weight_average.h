#pragma once

#include <cstdint>
#include <vector>

#include <torch/torch.h>

namespace tessera {

struct WeightAverageOptions {
  /// Begins with less memory: the n-th update (n from 0) uses min(decay, (1 + n) / (10 + n)).
  bool warmup = false;
};

/// Exponential moving average of weights: after each update average ← average + (1 − decay) · (live
/// − average), from the live values at construction on. Over any list of tensors: a model's
/// parameters, or the shards that this rank owns of sharded ones; the result does not depend, in
/// any bit, on how they are cut. Half types are averaged in float, tensors that are not
/// floating-point (counters) are copied. Local. Memory: one copy of the tensors (half types: in
/// float), and one more while swapped.
class WeightAverage {
 public:
  /// `live` are kept, not copied: the tensors that the optimizer updates. UsageError for a decay
  /// outside [0, 1) and for an undefined tensor, naming its index.
  WeightAverage(std::vector<at::Tensor> live, double decay, WeightAverageOptions options = {});
  WeightAverage(const WeightAverage&) = delete;
  WeightAverage& operator=(const WeightAverage&) = delete;

  /// After an optimizer step. UsageError while swapped.
  void update();

  /// Puts the averages into the live tensors, for an evaluation; called again, puts back what was
  /// there, bit by bit.
  void swap();
  bool swapped() const { return swapped_; }

  /// In the order of `live`, for saving: the own memory, not a copy; float for half types.
  const std::vector<at::Tensor>& averages() const { return averages_; }
  int64_t updates() const { return updates_; }
  /// Copies `averages`, of the sizes of averages(), and goes on after `updates`. UsageError, and
  /// nothing is changed, for sizes or a count that do not fit, naming the index, and while swapped.
  void load(const std::vector<at::Tensor>& averages, int64_t updates);

 private:
  void refuse_while_swapped(const char* call) const;

  std::vector<at::Tensor> live_, averages_, aside_;
  double decay_;
  WeightAverageOptions options_;
  int64_t updates_ = 0;
  bool swapped_ = false;
};

}  // namespace tessera
