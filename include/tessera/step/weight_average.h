#pragma once

#include <cstdint>
#include <vector>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

struct WeightAverageOptions {
  /// On: update n (counted from 0) uses decay min(decay, (1 + n) / (10 + n)), so that the
  /// average forgets the first weights sooner.
  bool warmup = false;
};

/// Exponential moving average of weights. It starts from the live values at construction; each
/// update sets average ← average + (1 − decay) · (live − average). `live` may be any list of
/// tensors: a model's parameters, or this rank's shards of them. The sharding of the parameters
/// does not change any bit of the result. Half types are averaged in float32; tensors that are not
/// floating-point (counters) are copied. Local. Memory: one copy of the tensors (of half types in
/// float32), and a second one while swapped.
class WeightAverage {
 public:
  /// Keeps references to `live`, the tensors that the optimizer updates. They stay valid while a
  /// parameter is frozen for some steps. Throws UsageError for a
  /// decay outside [0, 1), and for an undefined tensor, naming its index.
  WeightAverage(std::vector<at::Tensor> live, double decay, WeightAverageOptions options = {});
  WeightAverage(const WeightAverage&) = delete;
  WeightAverage& operator=(const WeightAverage&) = delete;

  /// Call it after each optimizer step. Throws UsageError while swapped.
  void update();

  /// Copies the averages into the live tensors, for an evaluation. The next call restores the
  /// previous values, bit by bit.
  void swap();
  bool swapped() const { return swapped_; }

  /// The averages themselves, not copies, in the order of `live`; float32 for half types.
  const std::vector<at::Tensor>& averages() const { return averages_; }
  int64_t updates() const { return updates_; }
  /// Copies `averages`, which must have the sizes of averages(), and continues after `updates`
  /// updates. Throws UsageError naming the index if a size differs, if the number of tensors
  /// differs or `updates` is negative, and while swapped. Nothing is changed then.
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
#pragma GCC visibility pop
