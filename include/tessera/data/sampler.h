#pragma once

#include <cstdint>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera {

enum class SampleOrder { sequential, shuffled };

/// "sequential" or "shuffled".
const char* to_string(SampleOrder order);

/// The position of a run in its data, and the size, order and seed that the position refers to.
struct SamplerState {
  int64_t position = 0;  ///< Samples consumed, over all ranks.
  int64_t size = 0;      ///< Samples in an epoch.
  SampleOrder order = SampleOrder::shuffled;
  uint64_t seed = 0;
};

/// The order of the samples in a run. The samples of a run are numbered from 0 over all ranks and
/// all epochs, and the ranks divide the numbers of a step among themselves. The order therefore
/// depends neither on the world size nor on the batch size. Pure arithmetic: memory does not grow
/// with the data. Local.
///
/// sequential: number n is sample n, also beyond the end of the data, where datasets start from the
/// beginning (dataset.h). shuffled: each epoch n / size visits every sample once, in an order that
/// is drawn from the seed and the epoch.
class Sampler {
 public:
  /// Throws UsageError when size < 1.
  explicit Sampler(int64_t size, SampleOrder order = SampleOrder::shuffled, uint64_t seed = 0);

  /// The sample with number `number` in the run. May be called from several threads at once. Throws
  /// UsageError when number < 0.
  int64_t sample(int64_t number) const;
  /// The samples with numbers [first, first + count).
  std::vector<int64_t> samples(int64_t first, int64_t count) const;

  /// Samples consumed so far, over all ranks. Only seek() and load_state() change it.
  int64_t position() const { return state_.position; }
  /// Throws UsageError when position < 0.
  void seek(int64_t position);
  /// Whole passes over the data that the position has completed.
  int64_t epoch() const { return state_.position / state_.size; }
  int64_t size() const { return state_.size; }

  const SamplerState& state() const { return state_; }
  /// Moves to the position of `state`. Throws UsageError naming both values if size, order or (for
  /// shuffled) seed differ from this sampler's, because the run would continue with other samples.
  /// The sampler is then unchanged.
  void load_state(const SamplerState& state);

 private:
  SamplerState state_;
};

}  // namespace tessera
#pragma GCC visibility pop
