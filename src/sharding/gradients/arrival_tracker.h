#pragma once

#include <cstddef>
#include <limits>
#include <vector>

namespace tessera::sharding {

/// Tracks the gradients that a backward is expected to produce, those that have arrived, and the
/// complete groups. A group is reduced together: a bucket, or a flat parameter. Pure numbers.
class ArrivalTracker {
 public:
  /// An expectation that no number of arrivals meets.
  static constexpr int kUnbounded = std::numeric_limits<int>::max();

  ArrivalTracker() = default;
  /// Gradient i belongs to group `group_of[i]`, which is below `groups`. Each gradient is expected
  /// once, and none has arrived.
  ArrivalTracker(std::vector<size_t> group_of, size_t groups);

  /// A backward is expected to produce `gradient` this many times; 0: not at all.
  void expect(size_t gradient, int arrivals);
  int expected(size_t gradient) const { return expected_[gradient]; }

  /// A new backward: nothing has arrived. Expectations stay.
  void begin();
  /// Notes one arrival; returns how often the gradient has arrived in this backward.
  int arrive(size_t gradient);
  int arrivals(size_t gradient) const { return arrivals_[gradient]; }

  /// True if every expected gradient of the group has arrived as often as expected, and for a group
  /// without expected gradients.
  bool complete(size_t group) const { return open_[group] == 0; }

  /// The gradients that have arrived in this backward, in the order of their first arrival.
  const std::vector<size_t>& order() const { return order_; }

 private:
  bool is_open(size_t gradient) const { return arrivals_[gradient] < expected_[gradient]; }

  std::vector<size_t> group_of_;
  std::vector<int> expected_, arrivals_;
  std::vector<size_t> open_;  // by group: gradients that have arrived less often than expected
  std::vector<size_t> order_;
};

}  // namespace tessera::sharding
