#pragma once

#include <torch/types.h>

namespace tessera::sharding {

/// Elements [begin, begin + numel) of one parameter, in its memory order, that this rank updates.
struct OwnedShard {
  size_t parameter;   ///< Index into the owner's list.
  int64_t begin;      ///< First element, in the parameter.
  int64_t numel;      ///< Number of elements; may be 0.
  int64_t at;         ///< First element, in own segment of the flat buffer.
  at::Tensor tensor;  ///< These elements: the local optimizer's parameter.
};

}  // namespace tessera::sharding
