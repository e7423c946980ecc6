#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/lbfgs.h>

#include "sharding/bucket.h"
#include "sharding/replace_state.h"
#include "sharding/shard_state.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/optim/state_slice.h"

namespace tessera {

namespace sharding {

void replace_states(torch::optim::Optimizer& optimizer, const std::string& who,
                    const std::vector<NewState>& states) {
  std::vector<std::optional<ParamState>> before;
  for (const auto& entry : states) before.push_back(get_state(optimizer, entry.shard));
  const auto put = [&](const NewState& entry, const std::optional<ParamState>& state) {
    if (state) set_state(optimizer, entry.shard, *state);
    else clear_state(optimizer, entry.shard);
  };
  size_t at = 0;
  const auto roll_back = [&] {
    for (size_t i = 0; i <= at; ++i) put(states[i], before[i]);
  };
  try {
    for (; at < states.size(); ++at) put(states[at], states[at].state);
  } catch (const UsageError& error) {
    roll_back();
    throw UsageError(fmt::format("{}: parameter {}: {}", who, states[at].parameter, error.what()));
  } catch (...) {
    roll_back();
    throw;
  }
}

at::Tensor shaped_like(const at::Tensor& run, const at::Tensor& shard) {
  return shard.dim() == 1 ? run : window(run, 0, shard);
}

}  // namespace sharding

namespace {

constexpr const char* kLoadSlices = "load_state_slices";

std::string elements(int64_t begin, int64_t numel) {
  return fmt::format("elements {} to {}", begin, begin + numel);
}

/// For a message: "strides [27, 1, 9, 3]".
std::string strides_text(const ElementRange& range) {
  return fmt::format("strides [{}]", fmt::join(range.strides, ", "));
}

void check_shard(const char* who, const ParameterShard& shard) {
  if (shard.tensor.defined() && shard.tensor.numel() == shard.numel) return;
  throw UsageError(fmt::format(
      "{}: the shard of parameter {}, {}, has {}; expected {} elements", who, shard.parameter,
      elements(shard.begin, shard.numel),
      shard.tensor.defined() ? fmt::format("a tensor of {}", shard.tensor.numel()) : "no tensor",
      shard.numel));
}

/// Slices by parameter, begin and numel.
class GivenSlices {
 public:
  explicit GivenSlices(std::vector<StateSlice>& slices) : slices_(slices) {
    for (auto& slice : slices) {
      const auto [first, added] =
          by_run_.emplace(std::tuple(slice.parameter, slice.begin, slice.numel), &slice);
      if (!added) twice_.insert(first->second);
    }
  }

  StateSlice& of(const ParameterShard& shard) const {
    const auto found = by_run_.find(std::tuple(shard.parameter, shard.begin, shard.numel));
    if (found == by_run_.end()) throw missing(shard);
    auto& slice = *found->second;
    if (twice_.count(&slice) > 0) {
      throw UsageError(fmt::format("{}: there are two slices for {} of parameter {}; expected one",
                                   kLoadSlices, elements(shard.begin, shard.numel),
                                   shard.parameter));
    }
    if (slice.shape != shard.shape) {
      throw UsageError(fmt::format("{}: the slice of parameter {} is of shape [{}]; expected [{}]",
                                   kLoadSlices, shard.parameter, fmt::join(slice.shape, ", "),
                                   fmt::join(shard.shape, ", ")));
    }
    if (!slice.strides.empty() && !shard.strides.empty() && slice.strides != shard.strides) {
      throw UsageError(fmt::format(
          "{}: the slice of parameter {} is in the memory order of {}; expected {}, or the slice "
          "from a checkpoint, which converts the order",
          kLoadSlices, shard.parameter, strides_text(slice), strides_text(shard)));
    }
    return slice;
  }

 private:
  UsageError missing(const ParameterShard& shard) const {
    std::vector<std::string> names, runs;
    for (const auto& slice : slices_) {
      names.push_back(slice.parameter);
      if (slice.parameter == shard.parameter) runs.push_back(elements(slice.begin, slice.numel));
    }
    if (runs.empty()) {
      return UsageError(fmt::format("{}: there is no slice of parameter {}{}", kLoadSlices,
                                    shard.parameter, did_you_mean(shard.parameter, names)));
    }
    return UsageError(fmt::format("{}: there is no slice for {} of parameter {}, but for {}",
                                  kLoadSlices, elements(shard.begin, shard.numel), shard.parameter,
                                  fmt::join(runs, ", ")));
  }

  const std::vector<StateSlice>& slices_;
  std::map<std::tuple<std::string, int64_t, int64_t>, StateSlice*> by_run_;
  std::unordered_set<const StateSlice*> twice_;
};

/// True if the slice has an optimizer's state; kWireResidual belongs to the wrapper.
bool has_state(const StateSlice& slice) {
  return slice.state.tensors.size() > slice.state.tensors.count(sharding::kWireResidual) ||
         !slice.state.scalars.empty();
}

/// Copies of the slice's tensors, in the form that the optimizer keeps for the shard. `release`:
/// the slice drops each tensor that was copied.
ParamState own_state(const torch::optim::Optimizer& optimizer, const ParameterShard& shard,
                     StateSlice& slice, bool release) {
  // LBFGS's vectors run over all of its parameters. With one parameter they have its size and would
  // look like tensors that follow it.
  const bool may_follow = dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr;
  const bool element_wise = is_element_wise(optimizer);
  ParamState own;
  own.scalars = slice.state.scalars;
  for (auto& [name, tensor] : slice.state.tensors) {
    if (name == sharding::kWireResidual) continue;
    const int64_t numel = tensor.defined() ? tensor.numel() : 0;
    const bool follows = may_follow && tensor.defined() && tensor.dim() > 0 && numel == shard.numel;
    if (!tensor.defined() || (element_wise && !follows && numel != 1)) {
      throw UsageError(fmt::format("{}: {} of parameter {} has {} elements; expected {}",
                                   kLoadSlices, name, shard.parameter, numel, shard.numel));
    }
    const auto copy = tensor.to(shard.tensor.device(), tensor.scalar_type(), false, true);
    if (!follows) own.tensors[name] = copy;
    else if (copy.sizes() == shard.tensor.sizes())
      own.tensors[name] =
          sharding::shaped_like(sharding::in_memory_order(copy, shard.tensor), shard.tensor);
    else own.tensors[name] = sharding::shaped_like(sharding::in_memory_order(copy), shard.tensor);
    if (release) tensor = at::Tensor();
  }
  return own;
}

void load(torch::optim::Optimizer& optimizer, const std::vector<ParameterShard>& shards,
          std::vector<StateSlice>& slices, bool release) {
  at::NoGradGuard no_grad;
  std::unordered_set<const void*> optimized;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) optimized.insert(parameter.unsafeGetTensorImpl());
  const GivenSlices given(slices);
  std::vector<sharding::NewState> states;
  for (const auto& shard : shards) {
    check_shard(kLoadSlices, shard);
    auto& slice = given.of(shard);
    if (optimized.count(shard.tensor.unsafeGetTensorImpl()) == 0) {
      if (!has_state(slice)) continue;
      throw UsageError(fmt::format(
          "{}: there is state of parameter {}, which is none of the optimizer's; expected none",
          kLoadSlices, shard.parameter));
    }
    states.push_back({shard.parameter, shard.tensor, std::nullopt});
    if (has_state(slice)) states.back().state = own_state(optimizer, shard, slice, release);
  }
  sharding::replace_states(optimizer, kLoadSlices, states);
}

}  // namespace

std::vector<int64_t> memory_strides(const at::Tensor& parameter) {
  const bool dense = parameter.is_non_overlapping_and_dense();
  auto strides = parameter.strides().vec();
  int64_t contiguous = 1;
  for (size_t i = strides.size(); i-- > 0;) {
    const int64_t size = parameter.size(static_cast<int64_t>(i));
    if (!dense) strides[i] = contiguous;
    if (size == 1) strides[i] = 1;
    contiguous *= size;
  }
  return strides;
}

ParameterShard whole_shard(const std::string& name, const at::Tensor& parameter) {
  return {{name, parameter.sizes().vec(), 0, parameter.numel(), memory_strides(parameter)},
          parameter};
}

std::vector<ParameterShard> parameter_shards(const NamedParameters& parameters) {
  std::vector<ParameterShard> shards;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined() || !tensor.requires_grad() || tensor.numel() == 0) continue;
    shards.push_back(whole_shard(name, tensor));
  }
  return shards;
}

std::vector<StateSlice> state_slices(const torch::optim::Optimizer& optimizer,
                                     const std::vector<ParameterShard>& shards) {
  at::NoGradGuard no_grad;
  std::vector<StateSlice> slices;
  for (const auto& shard : shards) {
    check_shard("state_slices", shard);
    auto& slice = slices.emplace_back(StateSlice{shard, {}});
    auto state = get_state(optimizer, shard.tensor);
    if (!state) continue;
    for (auto& [name, tensor] : state->tensors)
      if (follows_parameter(tensor, shard.tensor))
        tensor = sharding::in_memory_order(tensor, shard.tensor);
    slice.state = std::move(*state);
  }
  return slices;
}

void load_state_slices(torch::optim::Optimizer& optimizer,
                       const std::vector<ParameterShard>& shards,
                       const std::vector<StateSlice>& slices) {
  auto aliases = slices;
  load(optimizer, shards, aliases, false);
}

void load_state_slices(torch::optim::Optimizer& optimizer,
                       const std::vector<ParameterShard>& shards,
                       std::vector<StateSlice>&& slices) {
  load(optimizer, shards, slices, true);
}

void sharding::take_state_slices(torch::optim::Optimizer& optimizer,
                                 const std::vector<ParameterShard>& shards,
                                 std::vector<StateSlice>& slices) {
  load(optimizer, shards, slices, true);
}

}  // namespace tessera
