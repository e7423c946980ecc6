#include "tessera/step/nonfinite.h"

#include <cmath>

#include <fmt/format.h>

namespace tessera {
namespace {

bool has_fractions(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.numel() > 0 &&
         (at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()));
}

int64_t count(const at::Tensor& flags) { return flags.sum().item<int64_t>(); }

}  // namespace

std::string nonfinite_text(const at::Tensor& tensor) {
  if (!has_fractions(tensor)) return "";
  const torch::NoGradGuard no_grad;
  const at::Tensor parts =
      at::isComplexType(tensor.scalar_type()) ? at::view_as_real(tensor.detach()) : tensor.detach();
  // A finite sum has finite terms. A sum that is not finite may be an overflow of finite terms.
  const bool half = parts.element_size() < 4;
  if (std::isfinite((half ? parts.sum(at::kFloat) : parts.sum()).item<double>())) return "";
  const int64_t nans = count(at::isnan(parts)), infinities = count(at::isinf(parts));
  if (nans + infinities == 0) return "";
  const std::string of = fmt::format(" of {} elements", parts.numel());
  if (infinities == 0) return fmt::format("NaN in {}", nans) + of;
  if (nans == 0) return fmt::format("infinity in {}", infinities) + of;
  return fmt::format("NaN in {} and infinity in {}", nans, infinities) + of;
}

bool is_mask(const at::Tensor& tensor) {
  if (!has_fractions(tensor) || at::isComplexType(tensor.scalar_type())) return false;
  const torch::NoGradGuard no_grad;
  const at::Tensor values = tensor.detach();
  return count(values.eq(0)) + count(values.eq(-INFINITY)) == values.numel();
}

}  // namespace tessera
