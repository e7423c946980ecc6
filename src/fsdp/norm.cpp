#include "fsdp/core.h"
#include "tessera/error.h"
#include "tessera/fused_optimizer.h"

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <cmath>

namespace tessera::fsdp {

/// Of the pieces' gradients: each element of the model is in one piece of one shard group, so counted once.
double Core::grad_norm(double p) {
  if (!(p > 0)) throw UsageError(fmt::format("{}: norm_type is {}; expected a positive number or infinity", prefix(), p));
  require_idle("grad_norm or clip_grad_norm_");
  at::NoGradGuard no_grad;
  const bool maximum = std::isinf(p);
  double total = 0, any = 0;
  for (const auto& flat : model.flats) {
    for (const auto& piece : flat.pieces) {
      const auto& grad = piece.tensor.grad();
      any = grad.defined() ? 1 : any;
      if (!grad.defined() || grad.numel() == 0) continue;
      if (maximum) total = std::max(total, grad.abs().max().item<double>());
      else if (p == 2 && grad.scalar_type() == at::kFloat && grad.device().is_cpu() && grad.is_contiguous()) total += sum_of_squares(grad.data_ptr<float>(), grad.numel());
      else total += grad.to(at::kDouble).abs().pow(p).sum().item<double>();
    }
  }
  auto& group = model.shard_group;
  auto all = group.all_gather(at::tensor({total, any}, at::kDouble).to(group.control_device())).cpu().view({-1, 2});
  if (all.select(1, 1).max().item<double>() == 0) {
    if (model.world.rank() == 0) spdlog::warn("tessera: {}: there are no gradients to take the norm of", kName);
    return 0;
  }
  const auto parts = all.select(1, 0);
  return maximum ? parts.max().item<double>() : std::pow(parts.sum().item<double>(), 1 / p);
}

double Core::clip(double max_norm, double p) {
  if (!(max_norm >= 0)) throw UsageError(fmt::format("{}: max_norm is {}; expected 0 or more", prefix(), max_norm));
  const double norm = grad_norm(p);
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return norm;
  at::NoGradGuard no_grad;
  for (auto& flat : model.flats) {
    for (auto& piece : flat.pieces) {
      if (piece.tensor.grad().defined()) piece.tensor.mutable_grad().mul_(factor);
    }
  }
  return norm;
}

}  // namespace tessera::fsdp
