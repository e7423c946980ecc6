#include <algorithm>
#include <exception>
#include <optional>

#include <fmt/format.h>

#include "fsdp/state/state_dict_checks.h"
#include "sharding/bucket.h"
#include "tessera/error.h"
#include "tessera/module_state_dict.h"
#include "tessera/save_weights.h"
#include "tessera/step/agreement.h"
#include "tessera/weights/load_shard.h"
#include "tessera/weights/weights.h"

namespace tessera {

using namespace fsdp;
using State = std::vector<std::pair<std::string, at::Tensor>>;

namespace fsdp {

at::Tensor whole(const ShardedModel& model, size_t index, int to) {
  at::NoGradGuard no_grad;
  const auto& flat = *model.places[index].flat;
  const auto member = model.places[index].member;
  auto group = model.shard_group;
  const auto& ranks = group.world_ranks();
  const auto place = std::find(ranks.begin(), ranks.end(), group.size() == 1 ? 0 : to);
  if (to >= 0 && (group.size() == 1 ? model.world.rank() != to : place == ranks.end()))
    return {};  // another replica holds or gathers it
  const int root = to < 0 ? -1 : static_cast<int>(place - ranks.begin());
  const bool keep = to < 0 || model.world.rank() == to;
  const int64_t begin = flat.layout.offset(member), end = begin + flat.layout.size(member);
  std::vector<int64_t> counts;
  for (int r = 0; r < group.size(); ++r) {
    const int64_t from = flat.layout.segment_begin(r), until = from + flat.layout.counts()[r];
    counts.push_back(std::max<int64_t>(0, std::min(end, until) - std::max(begin, from)));
  }
  const auto own =
      sharding::in_memory_order(flat.shards[member].tensor.detach()).to(group.control_device());
  at::Tensor out;
  if (group.size() == 1) {
    out = own;
  } else if (root < 0) {
    out = at::empty({end - begin}, own.options());
    int64_t before = 0;
    for (int r = 0; r < group.rank(); ++r) before += counts[r];
    out.narrow(0, before, own.numel()).copy_(own);
    group.all_gather(out, counts);
  } else {
    std::vector<int64_t> send(group.size(), 0), receive(group.size(), 0);
    send[root] = own.numel();
    if (keep) receive = counts;
    out = at::empty({keep ? end - begin : 0}, own.options());
    group.all_to_all(out, own, receive, send);
  }
  if (!keep) return {};
  return sharding::window(out.cpu(), 0, model.parameters[index].tensor).contiguous().clone();
}

void take_shard(const ShardedModel& model, size_t index, const at::Tensor& whole) {
  at::NoGradGuard no_grad;
  const auto& parameter = model.parameters[index].tensor;
  auto& shard = model.shard_of(index);
  auto placed = at::empty(whole.sizes(), whole.options());
  if (parameter.is_non_overlapping_and_dense())
    placed = at::empty_strided(parameter.sizes(), parameter.strides(), whole.options());
  placed.copy_(whole);
  sharding::in_memory_order(shard.tensor)
      .copy_(sharding::in_memory_order(placed).narrow(0, shard.begin, shard.numel));
}

}  // namespace fsdp

State FullyShardedDataParallelBase::state_dict(int to) {
  auto& sharded = *sharded_;
  sharded.require_idle("state_dict");
  check_destination(sharded, "state_dict", to);
  const bool keep = to < 0 || sharded.model.world.rank() == to;
  State state;
  for (size_t i = 0; i < sharded.model.parameters.size(); ++i) {
    auto tensor = whole(sharded.model, i, to);
    if (keep) state.emplace_back(sharded.model.parameters[i].name, std::move(tensor));
  }
  if (!keep) return state;
  for (const auto& [name, tensor] : unsharded_values(sharded))
    state.emplace_back(name, tensor.to(at::kCPU, tensor.scalar_type(), false, true));
  return state;
}

at::Tensor FullyShardedDataParallelBase::full_parameter(const std::string& name, int to) {
  auto& sharded = *sharded_;
  sharded.require_idle("full_parameter");
  check_destination(sharded, "full_parameter", to);
  const auto& parameters = sharded.model.parameters;
  const auto found = std::find_if(parameters.begin(), parameters.end(),
                                  [&](const auto& parameter) { return parameter.name == name; });
  if (found == parameters.end())
    throw UsageError(
        fmt::format("{}: full_parameter: no sharded parameter {}", sharded.prefix(), name));
  return whole(sharded.model, static_cast<size_t>(found - parameters.begin()), to);
}

void FullyShardedDataParallelBase::save_state_dict(const std::string& path) {
  auto& sharded = *sharded_;
  sharded.require_idle("save_state_dict");
  const auto& parameters = sharded.model.parameters;
  std::vector<SafetensorsSpec> specs;
  for (size_t i = 0; i < parameters.size(); ++i)
    specs.push_back({parameters[i].name, sharded.model.places[i].flat->dtype(),
                     parameters[i].tensor.sizes().vec()});
  const auto others = unsharded_values(sharded);
  for (const auto& [name, tensor] : others)
    specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  SaveWeightsOptions options;
  options.metadata = {{"format", "pt"}};
  options.rank0_from = parameters.size();
  const auto value = [&](size_t i, int to) {
    return i < parameters.size() ? whole(sharded.model, i, to)
                                 : others[i - parameters.size()].second;
  };
  try {
    save_weights(sharded.model.world, path, specs, value, options);
  } catch (const AgreedError& error) {
    throw AgreedError(fmt::format("{}: save_state_dict: {}", kName, error.what()));
  }
}

UnmatchedNames FullyShardedDataParallelBase::load_state_dict(const State& state, bool strict) {
  auto& sharded = *sharded_;
  sharded.require_idle("load_state_dict");
  at::NoGradGuard no_grad;
  const std::map<std::string, at::Tensor> by_name(state.begin(), state.end());
  WeightsMatch match;
  check_on_all_ranks(sharded, "load_state_dict", [&] {
    const auto given = detail::entries_of("the state", state);
    match = detail::match_entries(sharded.module, "the state", given, strict);
    detail::check_equal("the state", match, [&](const auto& name) { return by_name.at(name); });
  });
  const auto is_given = [&](const auto& name) { return match.names.count(name) > 0; };
  const auto value_of = [&](const auto& name) { return by_name.at(match.names.at(name)); };
  const auto& parameters = sharded.model.parameters;
  State values;
  for (const auto& [name, tensor] : parameters)
    if (is_given(name)) values.emplace_back(name, value_of(name));
  check_same_values(sharded, "load_state_dict", values);
  sharded.residency->release_all();
  for (size_t i = 0; i < parameters.size(); ++i)
    if (is_given(parameters[i].name)) take_shard(sharded.model, i, value_of(parameters[i].name));
  for (auto& [name, tensor] : unsharded(sharded))
    if (is_given(name)) tensor.copy_(value_of(name));
  return match.unmatched;
}

UnmatchedNames FullyShardedDataParallelBase::load_state_dict(const std::string& path, bool strict) {
  auto& sharded = *sharded_;
  sharded.require_idle("load_state_dict");
  at::NoGradGuard no_grad;
  constexpr const char* kCall = "load_state_dict";
  std::optional<Weights> file;
  WeightsMatch match;
  check_on_all_ranks(sharded, kCall, [&] {
    file.emplace(path);
    match = match_weights(sharded.module, *file, strict);
    for (const auto& shard : shards(true)) {
      const auto found = match.names.find(shard.parameter);
      for (const auto& [first, second, advice] : match.equal)
        if (found != match.names.end() && first == found->second)
          check_equal_shards(*file, first, second, shard, advice);
    }
  });
  const auto is_given = [&](const auto& name) { return match.names.count(name) > 0; };
  sharded.residency->release_all();
  check_on_all_ranks(sharded, kCall, [&] {
    for (const auto& shard : shards(true))
      if (is_given(shard.parameter)) load_shard(*file, match.names.at(shard.parameter), shard);
    for (auto& [name, tensor] : unsharded(sharded))
      if (is_given(name)) tensor.copy_(file->load(match.names.at(name)));
  });
  return match.unmatched;
}

}  // namespace tessera
