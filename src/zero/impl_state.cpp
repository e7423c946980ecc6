#include <map>

#include <fmt/format.h>
#include <torch/serialize.h>

#include "sharding/bucket.h"
#include "sharding/replace_state.h"
#include "sharding/shard_state.h"
#include "tessera/error.h"
#include "zero/impl.h"

namespace tessera {
namespace {

/// The state of `ranges`, as a local optimizer over them has it.
OptimizerStateDict part_of(const OptimizerStateDict& whole, const std::vector<ElementRange>& ranges,
                           Partition partition) {
  OptimizerStateDict dict;
  dict.groups = whole.groups;
  for (const auto& range : ranges) {
    const auto found = whole.state.find(range.parameter);
    if (found == whole.state.end()) continue;
    ParamState state = found->second;
    for (auto& [key, tensor] : state.tensors) {
      if (partition != Partition::flat || tensor.sizes() != at::IntArrayRef(range.shape)) continue;
      const at::Tensor in_memory_order =
          at::empty_strided(tensor.sizes(), range.strides, tensor.options()).copy_(tensor);
      tensor = in_memory_order.as_strided({range.numel}, {1}, range.begin).clone();
    }
    dict.state.emplace(range.parameter, std::move(state));
  }
  return dict;
}

}  // namespace

/// The optimizer over whole parameters, with the present options and no state. Parameters on a
/// device are replaced by empty ones on the CPU, so that the whole state is there too.
ZeroRedundancyOptimizer::Impl::Plain ZeroRedundancyOptimizer::Impl::plain_optimizer() const {
  Plain plain;
  std::map<c10::TensorImpl*, at::Tensor> on_cpu;
  for (const auto& [name, tensor] : shards.parameters()) {
    auto stand_in = tensor;
    if (!tensor.is_cpu()) stand_in = at::empty_like(tensor, tensor.options().device(at::kCPU));
    on_cpu[tensor.unsafeGetTensorImpl()] = stand_in;
    plain.parameters.emplace_back(name, stand_in);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& visible : outer_.param_groups()) {
    std::vector<at::Tensor> members;
    for (const auto& tensor : visible.params()) {
      const auto found = on_cpu.find(tensor.unsafeGetTensorImpl());
      members.push_back(found == on_cpu.end() ? tensor : found->second);
    }
    groups.emplace_back(std::move(members), visible.options().clone());
  }
  plain.optimizer = factory_(std::move(groups));
  return plain;
}

void ZeroRedundancyOptimizer::Impl::save(torch::serialize::OutputArchive& archive) const {
  if (!consolidated) {
    throw UsageError(prefix() +
                     ": save: there is no state dict on this rank; call "
                     "consolidate_state_dict(rank) on all ranks, then torch::save on that rank");
  }
  const auto plain = plain_optimizer();
  tessera::load_state_dict(*plain.optimizer, plain.parameters, *consolidated);
  plain.optimizer->save(archive);
}

void ZeroRedundancyOptimizer::Impl::load(torch::serialize::InputArchive& archive) {
  const auto plain = plain_optimizer();
  plain.optimizer->load(archive);
  load(tessera::state_dict(*plain.optimizer, plain.parameters));
}

void ZeroRedundancyOptimizer::Impl::load_slices(std::vector<StateSlice>& slices) {
  try {
    sharding::take_state_slices(local.get(), parameter_shards(), slices);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("{}: {}", prefix(), error.what()));
  }
  shards.take_residuals(slices, true);
  frozen_state.clear();
  std::map<std::string, at::Tensor> frozen;
  for (size_t i = 0; i < shards.parameters().size(); ++i)
    if (!shards.in_bucket(i))
      frozen.emplace(shards.parameters()[i].name, shards.parameters()[i].tensor);
  for (const auto& slice : slices) {
    const auto found = frozen.find(slice.parameter);
    if (found == frozen.end() || slice.numel != found->second.numel() || slice.stateless())
      continue;
    auto state = slice.state;
    for (auto& [key, tensor] : state.tensors)
      if (tensor.dim() == 1 && tensor.numel() == slice.numel)
        tensor = sharding::window(tensor, 0, found->second);
    frozen_state.emplace(slice.parameter, std::move(state));
  }
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

OptimizerStateDict ZeroRedundancyOptimizer::rank_local_state_dict(std::optional<int> rank) const {
  const int own = impl_->group.rank(), of = rank.value_or(own);
  if (of < 0 || of >= impl_->group.size())
    throw UsageError(fmt::format("{}: rank_local_state_dict: rank is {}; expected 0 to {}",
                                 impl_->prefix(), of, impl_->group.size() - 1));
  return of == own ? impl_->local_state()
                   : part_of(state_dict(), partition()[of], impl_->options.partition);
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
