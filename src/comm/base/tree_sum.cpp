#include "comm/base/tree_sum.h"

namespace tessera::comm {

at::Tensor sum_rows(const at::Tensor& parts, double scale) {
  const at::NoGradGuard no_grad;
  const auto dtype = parts.scalar_type();
  const auto wide = is_narrow(dtype) ? parts.to(at::kFloat) : parts;
  auto sum = add_in_tree(
      static_cast<size_t>(wide.size(0)),
      [&](size_t row) { return wide[static_cast<int64_t>(row)]; },
      [](at::Tensor left, const at::Tensor& right) { return left.add_(right); });
  if (scale != 1) sum.mul_(scale);
  return sum.to(dtype);
}

}  // namespace tessera::comm
