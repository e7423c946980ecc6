#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/optim/optimizer_state.h"
#include "tessera/optim/optimizer_state_dict.h"

// What a rank holds of the parameters and of their optimizer's state, however they are dealt out:
// the terms in which checkpoints and averages see every wrapper. All of it is local.
//
// "Memory order" is that of the parameter's own strides, so slices go between modules whose
// parameters are stored alike.

namespace tessera {

/// Elements [begin, begin + numel) of one parameter, in memory order. The term in which wrappers,
/// state slices and checkpoints say which part of a parameter they mean.
struct ElementRange {
  std::string parameter;       ///< The parameter's name.
  std::vector<int64_t> shape;  ///< Shape of the whole parameter.
  int64_t begin = 0;           ///< First element.
  int64_t numel = 0;           ///< Number of elements.
};

/// The elements of one parameter that this rank updates. Each element of a model is in one shard of
/// one rank. Where ranks are replicas of each other, it is in equal shards of several ranks.
struct ParameterShard : ElementRange {
  /// These elements, as the tensor that the local optimizer holds. Write to it under
  /// torch::NoGradGuard.
  at::Tensor tensor;
};

/// The optimizer state of one range of elements.
struct StateSlice : ElementRange {
  /// Tensors of one dimension with `numel` elements, and tensors of the whole parameter's `shape`,
  /// follow the parameter: they are cut where it is cut. Their elements are taken in their own
  /// memory order, which must be the parameter's. Every rank keeps all other tensors (a step
  /// counter without dimensions, say) and all scalars whole. A tensor of one element also counts as
  /// kept whole when another rank's slice of the parameter shows that it is. Empty: the parameter
  /// was never stepped.
  ParamState state;

  bool stateless() const { return state.tensors.empty() && state.scalars.empty(); }
};

/// Of parameters that are not sharded: each is one shard, from 0, of all its elements. Frozen and
/// empty ones are left out.
std::vector<ParameterShard> parameter_shards(const NamedParameters& parameters);

/// One slice for each of `shards`, in their order. Tensors alias the optimizer's, so they change
/// with its next step; copies are only those that get_state() copies, or that are not stored in
/// their parameter's order. A shard of which the optimizer knows nothing was never stepped.
std::vector<StateSlice> state_slices(const torch::optim::Optimizer& optimizer,
                                     const std::vector<ParameterShard>& shards);

/// Gives each of `shards` the state of the slice with its parameter, begin and numel. Tensors are
/// copied, to the shard's device. An empty state is clear_state(). Slices of other shards do not
/// matter. Options are not state: they stay as they are. UsageError, and nothing changed, naming
/// the parameter: when a shard has no slice or two, for another shape, for a tensor of an
/// element-wise optimizer that has neither numel elements nor one, and for what set_state()
/// refuses.
void load_state_slices(torch::optim::Optimizer& optimizer,
                       const std::vector<ParameterShard>& shards,
                       const std::vector<StateSlice>& slices);

}  // namespace tessera
