#include "sharding/detection/local_norms.h"

namespace tessera::sharding {

void LocalNorms::reset() {
  const std::lock_guard lock(mutex_);
  normed_.clear();
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
  if (clips(uses[0], op)) refuse_();
}

bool LocalNorms::clips(const PageUse& use, std::string_view op) {
  const std::lock_guard lock(mutex_);
  const Gradient gradient{use.page->index(), use.offset};
  // The infinity norm is abs() and then max().
  if (op == "aten::norm" || op == "aten::linalg_vector_norm" || op == "aten::abs" ||
      op == "aten::pow" || op == "aten::square") {
    // An empty gradient begins where the next one begins.
    const bool again = normed_.count(gradient) > 0 && gradient != last_;
    if (again) normed_.clear();  // for example clipping after a log of all norms
    scaling_ = false;
    normed_.insert(gradient);
    last_ = gradient;
    return false;
  }
  const bool scales = use.written && (op == "aten::mul_" || op == "aten::div_");
  scaling_ = scales && (scaling_ || (!normed_.empty() && normed_ == all_()));
  normed_.clear();
  if (scaling_ && use.number) scales_.insert(op == "aten::div_" ? 1 / *use.number : *use.number);
  return scaling_ && use.overload == "Tensor" && op == "aten::mul_";
}

}  // namespace tessera::sharding
