#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include "tessera/optim/optimizer_state.h"
#include "tessera/optim/optimizer_state_dict.h"

// Describes the part of the parameters and of their optimizer state that a rank has, in the same
// way for every wrapper. Checkpoints and weight averages use it. Everything here is local.
//
// "Memory order" is the order of the elements in memory, by the parameter's strides. A range states
// its strides, so that a range of a channels-last weight is not mistaken for a range of a
// contiguous weight.

#pragma GCC visibility push(default)
namespace tessera {

/// Elements [begin, begin + numel) of one parameter, in memory order. Wrappers, state slices and
/// checkpoints use it to specify a part of a parameter.
struct ElementRange {
  std::string parameter;       ///< The parameter's name.
  std::vector<int64_t> shape;  ///< Shape of the whole parameter.
  int64_t begin = 0;           ///< First element.
  int64_t numel = 0;           ///< Number of elements.
  /// Strides of the whole parameter, which define the memory order; 1 for dimensions of size 1.
  /// Empty: not stated, and then not compared. See memory_strides().
  std::vector<int64_t> strides = {};
};

/// The strides that define the memory order of `parameter`: its own if it is dense, otherwise those
/// of a contiguous tensor of its shape; 1 for dimensions of size 1. Local.
std::vector<int64_t> memory_strides(const at::Tensor& parameter);

/// The elements of one parameter that this rank updates. Each element of a model is in exactly one
/// shard of one rank. If ranks are replicas of each other, their shards are equal.
struct ParameterShard : ElementRange {
  /// The elements, as the tensor that the local optimizer has. Write to it under
  /// torch::NoGradGuard.
  at::Tensor tensor;
};

/// The optimizer state of one range of elements.
struct StateSlice : ElementRange {
  /// A tensor of one dimension with `numel` elements, which are in memory order, or a tensor of the
  /// whole parameter's `shape`, in any memory order if `strides` is stated and otherwise in the
  /// parameter's, is sharded as the parameter is. Every rank has all other tensors (such as a step
  /// counter without dimensions) and all scalars in full. A tensor of one element is not sharded if
  /// another rank's slice of the parameter shows that. Empty: the parameter was never stepped.
  ParamState state;

  bool stateless() const { return state.tensors.empty() && state.scalars.empty(); }
};

/// All elements of one parameter.
ParameterShard whole_shard(const std::string& name, const at::Tensor& parameter);

/// The shards of parameters that are not sharded: each parameter is one shard of all its elements.
/// Frozen and empty parameters are left out. A list that was made before a parameter is frozen for
/// some steps stays valid and has its state.
std::vector<ParameterShard> parameter_shards(const NamedParameters& parameters);

/// Returns one slice for each of `shards`, in their order. The tensors alias the optimizer's and
/// change with its next step, except tensors that get_state() copies and tensors that are not
/// stored in their parameter's memory order. If the optimizer has no state for a shard, the slice's
/// state is empty.
std::vector<StateSlice> state_slices(const torch::optim::Optimizer& optimizer,
                                     const std::vector<ParameterShard>& shards);

/// Sets the state of each of `shards` to that of the slice with the same parameter, begin and
/// numel. Tensors are copied, to the shard's device. An empty state clears the shard's state
/// (clear_state()). Slices of other shards are ignored. Options are not part of the state and do
/// not change. Throws UsageError naming the parameter, with nothing changed, if a shard has no
/// slice or two slices, if a slice has another shape or memory order, if a tensor of an
/// element-wise optimizer has neither numel elements nor one, and if set_state() refuses a state.
void load_state_slices(torch::optim::Optimizer& optimizer,
                       const std::vector<ParameterShard>& shards,
                       const std::vector<StateSlice>& slices);
/// The same, dropping each tensor of `slices` when it has been copied. A state that was read from a
/// checkpoint is then in memory once: load_state_slices(optimizer, shards, checkpoint.load_slices(
/// …)). After an error `slices` is incomplete.
void load_state_slices(torch::optim::Optimizer& optimizer,
                       const std::vector<ParameterShard>& shards, std::vector<StateSlice>&& slices);

}  // namespace tessera
#pragma GCC visibility pop
