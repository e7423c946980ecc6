#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

namespace tessera {

/// [Note: order of reductions] Backward completes the last layers first, and the next forward uses
/// the first layers first. If the wire needs longer than backward, a part of the buckets travels
/// while the next forward computes. So `share` of the buckets, evenly spread, are reduced as
/// backward completes them, which keeps the wire busy. The others follow in reverse, so that
/// forward can begin, and the last bucket that arrives is used last.
///
/// Returns the numbers 0 to `buckets` - 1, which count the buckets as backward completes them, in
/// the order of their reductions. 0 is the first. share: > 0; 1 and more: the order of backward.
std::vector<size_t> order_of_reductions(size_t buckets, double share);

/// The part of the time of a backward's reductions that is within the backward.
class ReductionTimes {
 public:
  /// The reduction of bucket `index` begins: bucket 0 comes first.
  void begin(size_t index);
  /// All reductions have just ended. The part of the time since bucket 0 that had passed when the
  /// last bucket was complete, from 0 to 1.
  double share_in_backward() const;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point first_, last_;
};

/// The order of the buckets of one wrapper.
struct BucketOrder {
  /// The kind of order: of the parameters, of the arrival of gradients, or the last one.
  enum class Stage { of_parameters, of_arrival, last };

  Stage stage = Stage::of_parameters;
  double cap_mib = 0;            ///< Size of a bucket.
  std::vector<size_t> arrival;   ///< Parameters, as their gradients are expected.
  double share_in_backward = 1;  ///< See order_of_reductions().
  ReductionTimes times;
};

}  // namespace tessera
