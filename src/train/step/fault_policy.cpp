#include "train/step/fault_policy.h"

#include <algorithm>
#include <cmath>

namespace tessera::train {
namespace {

constexpr size_t kRecentLosses = 100;
constexpr size_t kFewestLosses = 20;  // before a loss can be a spike

}  // namespace

double FaultPolicy::median() const {
  std::deque<double> values = recent_;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Fault FaultPolicy::fault_of(double loss) const {
  if (!std::isfinite(loss)) return Fault::loss;
  if (!rules_.spike || recent_.size() < kFewestLosses) return Fault::none;
  // As far above the median as that multiple of a positive one: losses may be negative.
  const double middle = median();
  return loss > middle + (*rules_.spike - 1) * std::fabs(middle) ? Fault::spike : Fault::none;
}

bool FaultPolicy::may_update(double loss) const {
  const Fault fault = fault_of(loss);
  return fault == Fault::none || (fault == Fault::loss && rules_.norm_is_error);
}

Decision FaultPolicy::decide(double loss, double norm) {
  Fault fault = fault_of(loss);
  if (fault == Fault::none && !rules_.norm_may_overflow && !std::isfinite(norm))
    fault = Fault::gradient;
  if (fault == Fault::none) {
    skips_ = 0;
    recent_.push_back(loss);
    if (recent_.size() > kRecentLosses) recent_.pop_front();
    return {};
  }
  if (fault == Fault::spike) return {fault, Verdict::roll_back};
  if (rules_.on_nonfinite != Verdict::skip) return {fault, rules_.on_nonfinite};
  return {fault, ++skips_ > rules_.most_skips ? Verdict::stop : Verdict::skip};
}

}  // namespace tessera::train
