#include "comm/base/tree_sum.h"

namespace tessera::comm {

at::Tensor sum_rows(const at::Tensor& parts) {
  const at::NoGradGuard no_grad;
  const auto dtype = parts.scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = narrow ? parts.to(at::kFloat) : parts;
  return add_in_tree(
             static_cast<size_t>(wide.size(0)),
             [&](size_t row) { return wide[static_cast<int64_t>(row)]; },
             [](at::Tensor left, const at::Tensor& right) { return left.add_(right); })
      .to(dtype);
}

}  // namespace tessera::comm
