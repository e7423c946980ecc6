#include "fsdp/core.h"
#include "sharding/gradient_norm.h"

#include <spdlog/spdlog.h>

namespace tessera::fsdp {

/// Of the pieces' gradients: each element of the model is in one piece of one shard group, so counted once.
double Core::grad_norm(double p) {
  sharding::GradientNorm norm(prefix(), p);
  require_idle("grad_norm or clip_grad_norm_");
  for (const auto* piece : pieces()) norm.add(piece->tensor.grad());
  const double total = norm.total(model.shard_group);
  if (!norm.any() && model.world.rank() == 0) spdlog::warn("tessera: {}: there are no gradients to take the norm of", kName);
  return total;
}

double Core::clip(double max_norm, double p) {
  sharding::check_max_norm(prefix(), max_norm);
  const double norm = grad_norm(p);
  const double factor = sharding::clip_factor(max_norm, norm);
  if (factor == 1) return norm;
  at::NoGradGuard no_grad;
  for (const auto* piece : pieces()) {
    if (piece->tensor.grad().defined()) piece->tensor.grad().mul_(factor);
  }
  return norm;
}

}  // namespace tessera::fsdp
