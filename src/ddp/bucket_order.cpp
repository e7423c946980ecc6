#include "ddp/bucket_order.h"

#include <cmath>

namespace tessera {

std::vector<size_t> order_of_reductions(size_t buckets, double share) {
  std::vector<size_t> order, others;
  const auto up_to = [&](size_t count) { return std::ceil(static_cast<double>(count) * share); };
  for (size_t b = 0; b < buckets; ++b)
    (share >= 1 || up_to(b + 1) > up_to(b) ? order : others).push_back(b);
  order.insert(order.end(), others.rbegin(), others.rend());
  return order;
}

void ReductionTimes::begin(size_t index) {
  last_ = Clock::now();
  if (index == 0) first_ = last_;
}

double ReductionTimes::share_in_backward() const {
  const std::chrono::duration<double> all = Clock::now() - first_, in_backward = last_ - first_;
  return all.count() > 0 ? in_backward / all : 1;
}

}  // namespace tessera
