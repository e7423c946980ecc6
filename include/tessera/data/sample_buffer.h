#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/dataset.h"

#pragma GCC visibility push(default)
namespace tessera {

/// The rule by which a full SampleBuffer keeps samples.
enum class KeptSamples {
  newest,     ///< the last `capacity` ones
  reservoir,  ///< each sample so far with equal probability (Vitter's algorithm R)
};

struct SampleBufferOptions {
  int64_t capacity = 0;  ///< samples of this rank; 0: any number, all are kept
  KeptSamples keep = KeptSamples::newest;
  uint64_t seed = 0;  ///< of the reservoir and of draw(); give each rank a seed of its own
};

/// The samples that a program has made so far, in memory, to train on while it makes more. Each
/// rank has its own. Seed and calls determine the kept and drawn samples, so a run that resumes
/// with state() continues with the same batches. Local.
class SampleBuffer {
 public:
  /// UsageError for a negative capacity, and for a reservoir without one.
  explicit SampleBuffer(SampleBufferOptions options = {});

  /// Copies samples, which dimension 0 of both tensors counts. UsageError if the other dimensions
  /// or the dtypes differ from those of the first samples. `targets` may be undefined.
  void add(const at::Tensor& inputs, const at::Tensor& targets = {});
  int64_t size() const;                   ///< samples in the buffer
  int64_t seen() const { return seen_; }  ///< samples added so far

  /// Different samples of the buffer, in random order: `count` of them, or all if there are fewer.
  /// Undefined tensors before the first add(). UsageError for a negative count.
  Batch draw(int64_t count);

  /// The samples and counters by name, for a checkpoint; load_state() restores them. It refuses, by
  /// UsageError, a state of more samples than the capacity, and one without the names.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  void reserve(int64_t rows, const at::Tensor& inputs, const at::Tensor& targets);
  int64_t place_of(int64_t number) const;

  SampleBufferOptions options_;
  at::Tensor inputs_, targets_;  // with room for more rows than size()
  int64_t seen_ = 0, draws_ = 0;
};

}  // namespace tessera
#pragma GCC visibility pop
