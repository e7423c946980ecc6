#include "sharding/detection/local_norms.h"

namespace tessera::sharding {

void LocalNorms::reset() {
  const std::lock_guard lock(mutex_);
  normed_.clear();
}

void LocalNorms::need(c10::ArrayRef<PageUse> uses, std::string_view op) {
  if (clips(uses[0], op)) refuse_();
}

bool LocalNorms::clips(const PageUse& use, std::string_view op) {
  const std::lock_guard lock(mutex_);
  const Gradient gradient{use.page->index(), use.offset};
  // The infinity norm is abs() and then max().
  if (op == "aten::norm" || op == "aten::linalg_vector_norm" || op == "aten::abs") {
    // An empty gradient begins where the next one begins.
    const bool again = normed_.count(gradient) > 0 && gradient != last_;
    if (again) normed_.clear();  // for example clipping after a log of all norms
    normed_.insert(gradient);
    last_ = gradient;
    return false;
  }
  const bool result = op == "aten::mul_" && use.written && use.overload == "Tensor" &&
                      !normed_.empty() && normed_ == all_();
  normed_.clear();
  return result;
}

}  // namespace tessera::sharding
