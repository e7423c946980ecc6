#include "sharding/bucket.h"
#include "sharding/replace_state.h"
#include "tessera/error.h"
#include "tessera/nearest.h"
#include "tessera/state_slice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace tessera {

namespace sharding {

void replace_states(torch::optim::Optimizer& optimizer, const std::string& who, const std::vector<NewState>& states) {
  std::vector<std::optional<ParamState>> before;
  for (const auto& entry : states) before.push_back(get_state(optimizer, entry.piece));
  const auto put = [&](const NewState& entry, const std::optional<ParamState>& state) {
    if (state) set_state(optimizer, entry.piece, *state);
    else clear_state(optimizer, entry.piece);
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

at::Tensor shaped_like(const at::Tensor& run, const at::Tensor& piece) {
  return piece.dim() == 1 ? run : window(run, 0, piece);
}

}  // namespace sharding

namespace {

constexpr const char* kLoadSlices = "load_state_slices";

std::string elements(int64_t begin, int64_t numel) { return fmt::format("elements {} to {}", begin, begin + numel); }

void check_piece(const char* who, const ParameterPiece& piece) {
  if (piece.tensor.defined() && piece.tensor.numel() == piece.numel) return;
  throw UsageError(fmt::format(
      "{}: the piece of parameter {}, {}, has {}; expected {} elements", who, piece.parameter,
      elements(piece.begin, piece.numel),
      piece.tensor.defined() ? fmt::format("a tensor of {}", piece.tensor.numel()) : "no tensor", piece.numel));
}

/// Slices by what they are of.
class GivenSlices {
 public:
  explicit GivenSlices(const std::vector<StateSlice>& slices) : slices_(slices) {
    for (const auto& slice : slices) {
      const auto [first, added] = by_run_.emplace(std::tuple(slice.parameter, slice.begin, slice.numel), &slice);
      if (!added) twice_.insert(first->second);
    }
  }

  const StateSlice& of(const ParameterPiece& piece) const {
    const auto found = by_run_.find(std::tuple(piece.parameter, piece.begin, piece.numel));
    if (found == by_run_.end()) throw missing(piece);
    const auto& slice = *found->second;
    if (twice_.count(&slice) > 0) {
      throw UsageError(fmt::format("{}: there are two slices for {} of parameter {}; expected one", kLoadSlices,
                                   elements(piece.begin, piece.numel), piece.parameter));
    }
    if (slice.shape != piece.shape) {
      throw UsageError(fmt::format("{}: the slice of parameter {} is of shape [{}]; expected [{}]", kLoadSlices,
                                   piece.parameter, fmt::join(slice.shape, ", "), fmt::join(piece.shape, ", ")));
    }
    return slice;
  }

 private:
  UsageError missing(const ParameterPiece& piece) const {
    std::vector<std::string> names, runs;
    for (const auto& slice : slices_) {
      names.push_back(slice.parameter);
      if (slice.parameter == piece.parameter) runs.push_back(elements(slice.begin, slice.numel));
    }
    if (runs.empty()) {
      return UsageError(fmt::format("{}: there is no slice of parameter {}{}", kLoadSlices, piece.parameter,
                                    did_you_mean(piece.parameter, names)));
    }
    return UsageError(fmt::format("{}: there is no slice for {} of parameter {}, but for {}", kLoadSlices,
                                  elements(piece.begin, piece.numel), piece.parameter, fmt::join(runs, ", ")));
  }

  const std::vector<StateSlice>& slices_;
  std::map<std::tuple<std::string, int64_t, int64_t>, const StateSlice*> by_run_;
  std::unordered_set<const StateSlice*> twice_;
};

/// Copies of the slice's tensors as the optimizer keeps them for the piece.
ParamState own_state(const torch::optim::Optimizer& optimizer, const ParameterPiece& piece, const StateSlice& slice) {
  // LBFGS's vectors run over all of its parameters; with one parameter they only look as if they followed it.
  const bool may_follow = dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr;
  const bool element_wise = is_element_wise(optimizer);
  ParamState own;
  own.scalars = slice.state.scalars;
  for (const auto& [name, tensor] : slice.state.tensors) {
    const int64_t numel = tensor.defined() ? tensor.numel() : 0;
    const bool follows = may_follow && tensor.defined() && tensor.dim() > 0 && numel == piece.numel;
    if (!tensor.defined() || (element_wise && !follows && numel != 1)) {
      throw UsageError(fmt::format("{}: {} of parameter {} has {} elements; expected {}", kLoadSlices, name,
                                   piece.parameter, numel, piece.numel));
    }
    const auto copy = tensor.to(piece.tensor.device(), tensor.scalar_type(), false, true);
    own.tensors[name] = follows ? sharding::shaped_like(sharding::in_memory_order(copy), piece.tensor) : copy;
  }
  return own;
}

}  // namespace

std::vector<ParameterPiece> parameter_pieces(const NamedParameters& parameters) {
  std::vector<ParameterPiece> pieces;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined() || !tensor.requires_grad() || tensor.numel() == 0) continue;
    pieces.push_back({name, tensor.sizes().vec(), 0, tensor.numel(), tensor});
  }
  return pieces;
}

std::vector<StateSlice> state_slices(const torch::optim::Optimizer& optimizer,
                                     const std::vector<ParameterPiece>& pieces) {
  at::NoGradGuard no_grad;
  std::vector<StateSlice> slices;
  for (const auto& piece : pieces) {
    check_piece("state_slices", piece);
    auto& slice = slices.emplace_back(StateSlice{piece.parameter, piece.shape, piece.begin, piece.numel, {}});
    auto state = get_state(optimizer, piece.tensor);
    if (!state) continue;
    for (auto& [name, tensor] : state->tensors) {
      if (follows_parameter(tensor, piece.tensor)) tensor = sharding::in_memory_order(tensor, piece.tensor);
    }
    slice.state = std::move(*state);
  }
  return slices;
}

void load_state_slices(torch::optim::Optimizer& optimizer, const std::vector<ParameterPiece>& pieces,
                       const std::vector<StateSlice>& slices) {
  at::NoGradGuard no_grad;
  std::unordered_set<const void*> optimized;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) optimized.insert(parameter.unsafeGetTensorImpl());
  }
  const GivenSlices given(slices);
  std::vector<sharding::NewState> states;
  for (const auto& piece : pieces) {
    check_piece(kLoadSlices, piece);
    const auto& slice = given.of(piece);
    const bool stepped = !slice.state.tensors.empty() || !slice.state.scalars.empty();
    if (optimized.count(piece.tensor.unsafeGetTensorImpl()) == 0) {
      if (!stepped) continue;
      throw UsageError(
          fmt::format("{}: there is state of parameter {}, which is none of the optimizer's; expected none",
                      kLoadSlices, piece.parameter));
    }
    states.push_back({piece.parameter, piece.tensor, std::nullopt});
    if (stepped) states.back().state = own_state(optimizer, piece, slice);
  }
  sharding::replace_states(optimizer, kLoadSlices, states);
}

}  // namespace tessera
