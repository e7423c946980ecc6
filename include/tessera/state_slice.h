#pragma once

#include "tessera/optimizer_state.h"
#include "tessera/optimizer_state_dict.h"

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

// What a rank holds of the parameters and of their optimizer's state, however they are dealt out: the terms in which
// checkpoints and averages see every wrapper. All of it is local.
//
// "Memory order" is that of the parameter's own strides, so slices go between modules whose parameters are stored
// alike.

namespace tessera {

/// A run of one parameter's elements that this rank updates. Each element of a model is in one piece of one rank, or,
/// where ranks are replicas of each other, in equal pieces of several.
struct ParameterPiece {
  std::string parameter;
  std::vector<int64_t> shape;  ///< Of the whole parameter.
  int64_t begin = 0;           ///< First element, in memory order …
  int64_t numel = 0;           ///< … and how many.
  at::Tensor
      tensor;  ///< Those elements: what the local optimizer has as its parameter. Write under torch::NoGradGuard.
};

/// The optimizer state of such a run.
struct StateSlice {
  std::string parameter;
  std::vector<int64_t> shape;
  int64_t begin = 0;
  int64_t numel = 0;
  /// Tensors of one dimension with `numel` elements, and those of the whole parameter's `shape`, follow the parameter:
  /// they are cut where it is cut, and their elements are taken in their own memory order, which must be the
  /// parameter's. All others (a step counter without dimensions, say) are kept whole by every rank, as are scalars; a
  /// tensor of one element is also taken as kept whole when another rank's slice of the parameter shows that it is.
  /// Empty: never stepped.
  ParamState state;

  bool stateless() const { return state.tensors.empty() && state.scalars.empty(); }
};

/// Which run of which parameter a rank wants; as in StateSlice.
struct SliceRequest {
  std::string parameter;
  std::vector<int64_t> shape;
  int64_t begin = 0;
  int64_t numel = 0;
};

/// Of parameters that are not sharded: each is one piece, from 0, of all its elements. Frozen and empty ones are left
/// out.
std::vector<ParameterPiece> parameter_pieces(const NamedParameters& parameters);

/// One slice for each of `pieces`, in their order. Tensors alias the optimizer's, so they change with its next step;
/// copies are only those that get_state() copies, or that are not stored in their parameter's order. A piece of which
/// the optimizer knows nothing was never stepped.
std::vector<StateSlice> state_slices(const torch::optim::Optimizer& optimizer,
                                     const std::vector<ParameterPiece>& pieces);

/// Gives each of `pieces` the state of the slice with its parameter, begin and numel. Tensors are copied, to the
/// piece's device. An empty state is clear_state(). Slices of other pieces do not matter. Options are not state: they
/// stay as they are. UsageError, and nothing changed, naming the parameter: when a piece has no slice or two, for
/// another shape, for a tensor of an element-wise optimizer that has neither numel elements nor one, and for what
/// set_state() refuses.
void load_state_slices(torch::optim::Optimizer& optimizer, const std::vector<ParameterPiece>& pieces,
                       const std::vector<StateSlice>& slices);

}  // namespace tessera
