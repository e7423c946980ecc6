#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

enum class SampleOrder { sequential, shuffled };

/// "sequential" or "shuffled".
const char* to_string(SampleOrder order);

/// Where a run stands in its data, and of which data and order that is.
struct SamplerState {
  int64_t position = 0;
  int64_t size = 0;
  SampleOrder order = SampleOrder::shuffled;
  uint64_t seed = 0;
};

/// Which sample comes when. The samples of a run are numbered from 0 over all ranks and all epochs,
/// so that the order depends neither on the world size nor on the batch's size: ranks divide the
/// numbers of a step among themselves. Pure arithmetic; no memory grows with the data.
///
/// sequential: number n is sample n, counting on beyond the end of the data, where datasets begin
/// anew (dataset.h). shuffled: each epoch (n / size) goes once through all samples, in an order
/// drawn from seed and epoch.
class Sampler {
 public:
  /// Throws UsageError when size < 1.
  explicit Sampler(int64_t size, SampleOrder order = SampleOrder::shuffled, uint64_t seed = 0);

  /// The number-th sample of the run. May be called from several threads. Throws UsageError when
  /// number < 0.
  int64_t sample(int64_t number) const;
  /// Numbers [first, first + count).
  std::vector<int64_t> samples(int64_t first, int64_t count) const;

  /// Samples consumed so far, over all ranks. The sampler never moves by itself.
  int64_t position() const { return state_.position; }
  /// Throws UsageError when position < 0.
  void seek(int64_t position);
  /// Of the position: whole passes over the data made so far.
  int64_t epoch() const { return state_.position / state_.size; }
  int64_t size() const { return state_.size; }

  const SamplerState& state() const { return state_; }
  /// Goes to the position of `state`. Throws UsageError naming both values when size, order or
  /// (shuffled) seed are not this sampler's: the run would go on with other data than it would have
  /// seen. Unchanged then.
  void load_state(const SamplerState& state);

 private:
  SamplerState state_;
};

}  // namespace tessera
