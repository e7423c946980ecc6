#pragma once

#include <torch/torch.h>

namespace tessera::sharding {

/// A run of one parameter, in its memory order, that this rank updates.
struct OwnedShard {
  size_t parameter;  ///< Index into the owner's list.
  int64_t begin;     ///< First element.
  int64_t numel;
  int64_t at;         ///< First element, in own segment of the flat buffer.
  at::Tensor tensor;  ///< What the local optimizer has as its parameter.
};

}  // namespace tessera::sharding
