#include "sharding/detection/local_norms.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::sharding {
namespace {

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

/// The number by which the operator multiplies or divides; kNoNumber if it is not one number.
double number_of(const PageUse& use) {
  const auto* const other = use.other;
  if (other == nullptr || !other->is_cpu() || other->numel() != 1 || other->is_complex())
    return use.number.value_or(kNoNumber);
  return other->item<double>();
}

}  // namespace

void LocalNorms::reset() {
  const std::lock_guard lock(mutex_);
  read_.clear();
  scaling_ = false;
}

std::vector<char> LocalNorms::take_scales() {
  const std::lock_guard lock(mutex_);
  size_t hash = 0;
  for (const double scale : std::exchange(scales_, {}))
    hash = hash * 31 + std::hash<double>()(scale);
  std::vector<char> bits(kBits);
  for (size_t i = 0; i < kBits; ++i) bits[i] = ((hash ^ hash >> 32) >> i) & 1;
  return bits;
}

void LocalNorms::need(c10::ArrayRef<PageUse> uses, std::string_view op) {
  if (clips(uses, op)) refuse_();
}

bool LocalNorms::clips(c10::ArrayRef<PageUse> uses, std::string_view op) {
  const auto is = [op](std::initializer_list<std::string_view> ops) {
    return std::find(ops.begin(), ops.end(), op) != ops.end();
  };
  // The operators on the results are detected.
  if (is({"aten::detach", "aten::view", "aten::requires_grad_"})) return false;
  const std::lock_guard lock(mutex_);
  const auto& use = uses[0];
  const bool divides = op.find("div") != op.npos;
  const double number = divides || op.find("mul") != op.npos ? number_of(use) : kNoNumber;
  const bool known = !std::isnan(number);
  const bool scales = known || (use.written && is({"aten::mul_", "aten::div_"}));
  scaling_ = scales && (scaling_ || (!read_.empty() && read_ == all_()));
  if (scaling_ || use.written) {
    read_.clear();
    if (scaling_ && known) scales_.insert(divides ? 1 / number : number);
    return scaling_ && by_norms_ && use.overload == "Tensor" && op == "aten::mul_";
  }
  // The infinity norm is abs() and then max().
  const bool norm =
      is({"aten::norm", "aten::linalg_vector_norm", "aten::abs", "aten::pow", "aten::square"});
  for (const auto& each : uses) {
    const Gradient gradient{each.page->index(), each.offset};
    // An empty gradient begins where the next one begins.
    if (read_.count(gradient) > 0 && gradient != last_) read_.clear();  // clipping after a log
    by_norms_ = norm && (by_norms_ || read_.empty());
    read_.insert(gradient);
    last_ = gradient;
  }
  return false;
}

}  // namespace tessera::sharding
