#include <fmt/format.h>

#include "sharding/shard_state.h"
#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {

/// With overlap, what backward has sent is still being updated, on another thread.
void ZeroRedundancyOptimizer::Impl::require_settled(const char* call) const {
  if (sent_.empty()) return;
  throw UsageError(
      fmt::format("{}: {} was called between backward and step(), while overlap_with_backward "
                  "updates; expected after step()",
                  prefix(), call));
}

std::vector<ParameterShard> ZeroRedundancyOptimizer::shards() const {
  return sharding::parameter_shards(impl_->owned_shards(), impl_->parameters_);
}

std::vector<StateSlice> ZeroRedundancyOptimizer::state_slices() const {
  impl_->require_settled("state_slices");
  return tessera::state_slices(*impl_->local_, shards());
}

void ZeroRedundancyOptimizer::load_state_slices(const std::vector<StateSlice>& slices) {
  impl_->require_settled("load_state_slices");
  try {
    tessera::load_state_slices(*impl_->local_, shards(), slices);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}", impl_->prefix(), error.what()));
  }
  impl_->parked_.clear();
}

void ZeroRedundancyOptimizer::gather_parameters() {
  at::NoGradGuard no_grad;
  impl_->require_settled("gather_parameters");
  impl_->check_storage();
  impl_->gather_all();
}

void ZeroRedundancyOptimizer::clip_grad_value_(double clip_value) { impl_->clip_value(clip_value); }
std::vector<OptimizerStateDict::Group> ZeroRedundancyOptimizer::groups() const {
  return impl_->groups();
}

}  // namespace tessera
