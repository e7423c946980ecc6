#include "sharding/shard_state.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "sharding/bucket.h"
#include "sharding/replace_state.h"
#include "tessera/error.h"

namespace tessera::sharding {

// [Note: gathering state] First the ranks exchange, in a few bytes, the list of state tensors of
// each shard. All ranks derive the same order from it. Then the shards go to the receiving rank one
// tensor at a time, so no rank ever holds more than one extra tensor.

namespace {

using nlohmann::json;

struct ShardInfo {
  int rank;
  int64_t begin, numel;
  json tensors;  // name -> {dtype, follows, sizes}
  json scalars;
};

json describe(const ParamState& state, const at::Tensor& shard) {
  json tensors = json::object(), scalars = json::object();
  for (const auto& [name, tensor] : state.tensors) {
    tensors[name] = {{"dtype", static_cast<int>(tensor.scalar_type())},
                     {"follows", follows_parameter(tensor, shard)},
                     {"sizes", tensor.sizes().vec()}};
  }
  for (const auto& [name, value] : state.scalars)
    std::visit([&, n = name](auto v) { scalars[n] = v; }, value);
  return {{"tensors", tensors}, {"scalars", scalars}};
}

ScalarValue scalar_of(const json& value) {
  if (value.is_number_integer()) return value.get<int64_t>();
  return value.get<double>();
}

/// The whole of a tensor of state that `description` describes, on rank `to`, or on all with -1;
/// undefined on the others. `own_part`: of this rank; undefined: it has none. `like`: the
/// parameter.
at::Tensor gather_tensor(const json& description, const std::vector<ShardInfo>& infos,
                         const at::Tensor& like, const at::Tensor& own_part, ProcessGroup& group,
                         int to) {
  const bool keep = to < 0 || to == group.rank();
  const auto dtype = static_cast<at::ScalarType>(description["dtype"].get<int>());
  const bool follows = description["follows"];
  std::vector<int64_t> counts(group.size(), 0);
  for (const auto& info : infos)
    if (follows) counts[info.rank] = info.numel;
  const auto sizes = description["sizes"].get<std::vector<int64_t>>();
  if (!follows) counts[infos[0].rank] = c10::multiply_integers(sizes);
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});

  const auto device = group.control_device();
  at::Tensor own = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  if (counts[group.rank()] > 0) own = in_memory_order(own_part).to(device);
  auto flat = at::empty({keep ? total : 0}, own.options());
  std::vector<int64_t> send(group.size(), 0), receive(group.size(), 0);
  if (keep) receive = counts;
  for (int rank = 0; rank < group.size(); ++rank)
    if (to < 0 || to == rank) send[rank] = own.numel();
  auto outgoing = own;
  if (to < 0 && group.size() > 1) outgoing = own.repeat({group.size()});
  group.all_to_all(flat, outgoing, receive, send);
  if (!keep) return {};
  flat = flat.cpu();
  // Shards are in the parameter's memory order; the dict has tensors of its shape.
  return follows ? window(flat, 0, like).contiguous().clone() : flat.view(sizes);
}

}  // namespace

std::map<std::string, ParamState> gather_shard_state(const torch::optim::Optimizer& local,
                                                     const std::vector<const OwnedShard*>& shards,
                                                     const std::vector<NamedTensor>& parameters,
                                                     ProcessGroup& group, int to) {
  at::NoGradGuard no_grad;
  std::map<std::string, ParamState> result;
  std::map<size_t, ParamState> mine;
  json listing = json::array();
  for (const auto* shard : shards) {
    // An empty shard may have been stepped or loaded separately, so its step counter may differ
    // from the parameter's.
    if (shard->numel == 0 && parameters[shard->parameter].tensor.numel() > 0) continue;
    auto state = get_state(local, shard->tensor);
    if (!state) continue;
    auto entry = describe(*state, shard->tensor);
    entry.update(
        {{"parameter", shard->parameter}, {"begin", shard->begin}, {"numel", shard->numel}});
    listing.push_back(std::move(entry));
    mine.emplace(shard->parameter, std::move(*state));
  }
  std::map<size_t, std::vector<ShardInfo>> described;
  const auto lists = group.all_gather_bytes(listing.dump());
  for (int rank = 0; rank < group.size(); ++rank) {
    for (auto& entry : json::parse(lists[rank])) {
      described[entry["parameter"]].push_back(
          {rank, entry["begin"], entry["numel"], entry["tensors"], entry["scalars"]});
    }
  }

  const bool keep = to < 0 || to == group.rank();
  for (const auto& [parameter, infos] : described) {
    const auto& like = parameters[parameter].tensor;
    ParamState whole;
    for (const auto& item : infos[0].scalars.items())
      whole.scalars[item.key()] = scalar_of(item.value());
    for (const auto& item : infos[0].tensors.items()) {
      const auto found = mine.find(parameter);
      const at::Tensor own =
          found == mine.end() ? at::Tensor() : found->second.tensors.at(item.key());
      const at::Tensor all = gather_tensor(item.value(), infos, like, own, group, to);
      if (keep) whole.tensors[item.key()] = all;
    }
    if (keep) result.emplace(parameters[parameter].name, std::move(whole));
  }
  return result;
}

void load_shard_state(torch::optim::Optimizer& local, const std::vector<const OwnedShard*>& shards,
                      const std::vector<NamedTensor>& parameters,
                      const std::map<std::string, ParamState>& state) {
  at::NoGradGuard no_grad;
  std::vector<NewState> states;
  for (const auto* owned : shards) {
    const auto& shard = *owned;
    const auto& parameter = parameters[shard.parameter];
    auto& entry = states.emplace_back(NewState{parameter.name, shard.tensor, std::nullopt});
    const auto found = state.find(parameter.name);
    if (found == state.end()) continue;
    ParamState own;
    own.scalars = found->second.scalars;
    for (const auto& [key, tensor] : found->second.tensors) {
      if (key == kWireResidual) continue;
      const auto copy = [&](const at::Tensor& part) {
        return part.to(shard.tensor.device(), tensor.scalar_type(), false, true);
      };
      const bool follows = tensor.sizes().equals(parameter.tensor.sizes());
      if (!follows) own.tensors[key] = copy(tensor);
      else
        own.tensors[key] = shaped_like(
            copy(in_memory_order(tensor, parameter.tensor).narrow(0, shard.begin, shard.numel)),
            shard.tensor);
    }
    if (!own.tensors.empty() || !own.scalars.empty()) entry.state = std::move(own);
  }
  replace_states(local, "load_state_dict", states);
}

std::vector<ParameterShard> parameter_shards(const std::vector<const OwnedShard*>& owned,
                                             const std::vector<NamedTensor>& parameters) {
  auto in_order = owned;
  std::stable_sort(in_order.begin(), in_order.end(),
                   [](const auto* a, const auto* b) { return a->parameter < b->parameter; });
  std::vector<ParameterShard> shards;
  for (const auto* shard : in_order) {
    if (shard->numel == 0) continue;
    const auto& [name, tensor] = parameters[shard->parameter];
    shards.push_back(
        {{name, tensor.sizes().vec(), shard->begin, shard->numel, memory_strides(tensor)},
         shard->tensor});
  }
  return shards;
}

void take_group_options(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict) {
  auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g)
    set_options(*groups[g].options().clone(), dict.groups[g].options);
  for (size_t g = 0; g < groups.size(); ++g)
    set_options(groups[g].options(), dict.groups[g].options);
}

void check_groups(const std::string& who, const std::vector<std::vector<std::string>>& names,
                  const OptimizerStateDict& dict) {
  if (names.size() != dict.groups.size()) {
    throw UsageError(fmt::format("{}: the state dict has {} parameter groups; expected {}", who,
                                 dict.groups.size(), names.size()));
  }
  for (size_t g = 0; g < names.size(); ++g) {
    const auto &mine = names[g], &theirs = dict.groups[g].parameters;
    for (size_t i = 0; i < std::max(mine.size(), theirs.size()); ++i) {
      const auto here = i < mine.size() ? mine[i] : "nothing",
                 there = i < theirs.size() ? theirs[i] : "nothing";
      if (here != there)
        throw UsageError(
            fmt::format("{}: group {}, parameter {}: the optimizer has {}, the state dict {}", who,
                        g, i, here, there));
    }
  }
}

OptimizerStateDict for_groups(const OptimizerStateDict& dict,
                              const std::vector<std::vector<std::string>>& names,
                              const torch::optim::Optimizer& optimizer) {
  std::map<std::string, const OptionMap*> options;
  for (const auto& group : dict.groups)
    for (const auto& name : group.parameters) options.emplace(name, &group.options);
  OptimizerStateDict result;
  for (size_t g = 0; g < names.size(); ++g) {
    const auto known = std::find_if(names[g].begin(), names[g].end(),
                                    [&](const auto& name) { return options.count(name) > 0; });
    result.groups.push_back({names[g], known != names[g].end()
                                           ? *options.at(*known)
                                           : get_options(optimizer.param_groups()[g].options())});
    for (const auto& name : names[g])
      if (const auto found = dict.state.find(name); found != dict.state.end())
        result.state.insert(*found);
  }
  return result;
}

}  // namespace tessera::sharding
