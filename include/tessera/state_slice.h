#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/optimizer_state.h"

// Optimizer state as one rank keeps it, whichever wrapper made it: the whole of a parameter's (plain, DDP: begin 0,
// numel all), or a run of it (ZeRO, FSDP). Elements are counted in the parameter's memory order, which for a contiguous
// parameter is row-major.

namespace tessera {

/// What one rank keeps of one parameter's state.
struct StateSlice {
  std::string parameter;       ///< Its dotted name in the model.
  std::vector<int64_t> shape;  ///< Of the whole parameter.
  int64_t begin = 0;           ///< First element of the run.
  int64_t numel = 0;           ///< Elements of the run.
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

}  // namespace tessera
