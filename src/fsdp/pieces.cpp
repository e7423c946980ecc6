#include "fsdp/core.h"
#include "sharding/gradient_norm.h"
#include "sharding/piece_state.h"

namespace tessera {

std::vector<ParameterPiece> FullyShardedDataParallelBase::pieces() const {
  const auto& core = core_->core();
  std::vector<const sharding::OwnedPiece*> trainable;
  for (const auto* piece : core.pieces()) {
    if (piece->tensor.requires_grad()) trainable.push_back(piece);
  }
  return sharding::parameter_pieces(trainable, core.model.parameters);
}

bool FullyShardedDataParallelBase::first_replica() const { return core_->core().model.replicas.rank() == 0; }

void FullyShardedDataParallelBase::clip_grad_value_(double clip_value) {
  auto& core = core_->core();
  sharding::check_clip_value(core.prefix(), clip_value);
  core.require_idle("clip_grad_value_");
  at::NoGradGuard no_grad;
  for (const auto* piece : core.pieces()) {
    if (piece->tensor.grad().defined()) piece->tensor.mutable_grad().clamp_(-clip_value, clip_value);
  }
}

}  // namespace tessera
