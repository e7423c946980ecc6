#include "sharding/gradients/arrival_tracker.h"

#include <algorithm>
#include <utility>

namespace tessera::sharding {

ArrivalTracker::ArrivalTracker(std::vector<size_t> group_of, size_t groups)
    : group_of_(std::move(group_of)), expected_(group_of_.size(), 1), open_(groups, 0) {
  begin();
}

void ArrivalTracker::expect(size_t gradient, int arrivals) {
  auto& open = open_[group_of_[gradient]];
  open -= is_open(gradient);
  expected_[gradient] = arrivals;
  open += is_open(gradient);
}

void ArrivalTracker::begin() {
  arrivals_.assign(group_of_.size(), 0);
  order_.clear();
  std::fill(open_.begin(), open_.end(), 0);
  for (size_t i = 0; i < group_of_.size(); ++i) open_[group_of_[i]] += is_open(i);
}

int ArrivalTracker::arrive(size_t gradient) {
  auto& open = open_[group_of_[gradient]];
  open -= is_open(gradient);
  if (++arrivals_[gradient] == 1) order_.push_back(gradient);
  open += is_open(gradient);
  return arrivals_[gradient];
}

}  // namespace tessera::sharding
