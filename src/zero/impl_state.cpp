#include <fmt/format.h>

#include "sharding/shard_state.h"
#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {

NamedParameters ZeroRedundancyOptimizer::Impl::named() const {
  NamedParameters names;
  for (const auto& [name, tensor] : shards.parameters()) names.emplace_back(name, tensor);
  return names;
}

/// The optimizer over whole parameters, with the present options and no state.
std::unique_ptr<torch::optim::Optimizer> ZeroRedundancyOptimizer::Impl::plain_optimizer() const {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& visible : outer_.param_groups())
    groups.emplace_back(visible.params(), visible.options().clone());
  return factory_(std::move(groups));
}

void ZeroRedundancyOptimizer::Impl::save(torch::serialize::OutputArchive& archive) const {
  if (!consolidated) {
    throw UsageError(prefix() +
                     ": save: there is no state dict on this rank; call "
                     "consolidate_state_dict(rank) on all ranks, then torch::save on that rank");
  }
  const auto plain = plain_optimizer();
  tessera::load_state_dict(*plain, named(), *consolidated);
  plain->save(archive);
}

void ZeroRedundancyOptimizer::Impl::load(torch::serialize::InputArchive& archive) {
  const auto plain = plain_optimizer();
  plain->load(archive);
  load(tessera::state_dict(*plain, named()));
}

OptimizerStateDict ZeroRedundancyOptimizer::Impl::local_state() const {
  OptimizerStateDict dict;
  dict.groups = groups();
  for (const auto* shard : shards.owned()) {
    if (shard->numel == 0) continue;
    if (auto state = get_state(local.get(), shard->tensor))
      dict.state.emplace(shards.parameters()[shard->parameter].name, std::move(*state));
  }
  return dict;
}

std::vector<std::vector<ElementRange>> ZeroRedundancyOptimizer::partition() const {
  const auto& parameters = impl_->shards.parameters();
  std::vector<std::vector<ElementRange>> result(impl_->group.size());
  for (const auto& bucket : impl_->shards.buckets()) {
    for (int rank = 0; rank < impl_->group.size(); ++rank) {
      for (const auto& slice : bucket.layout.slices(rank)) {
        if (slice.numel == 0) continue;
        const auto& [name, tensor] = parameters[bucket.members[slice.tensor]];
        result[rank].push_back(
            {name, tensor.sizes().vec(), slice.begin, slice.numel, memory_strides(tensor)});
      }
    }
  }
  return result;
}

}  // namespace tessera
