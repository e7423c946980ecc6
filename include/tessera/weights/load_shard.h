#pragma once

#include <string>

#include "tessera/optim/state_slice.h"
#include "tessera/weights/tensor_source.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Sets the elements of `shard` to those of tensor `name` of `weights`, and converts dtype and
/// device. Reads only them: into the shard's own memory if dtype and device are the same, otherwise
/// through a tensor of their size. If row-major order is not the parameter's memory order, it reads
/// the whole tensor. Throws UsageError if the tensor has another shape than the parameter. Local.
void load_shard(const TensorSource& weights, const std::string& name, const ParameterShard& shard);

/// Throws UsageError, which ends with `advice`, unless the elements of `shard` are equal in tensors
/// `first` and `second` of `weights`. Local.
void check_equal_shards(const TensorSource& weights, const std::string& first,
                        const std::string& second, const ParameterShard& shard,
                        const std::string& advice);

}  // namespace tessera
#pragma GCC visibility pop
