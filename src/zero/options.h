#pragma once

#include <memory>
#include <vector>

#include "sharding/named_tensor.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::zero {

/// An optimizer of one parameter.
std::unique_ptr<torch::optim::Optimizer> example_of(const OptimizerFactory& factory);
/// Whether an update of one parameter depends on the others, so that one rank needs all of them.
bool uses_all_parameters(const OptimizerFactory& factory);
/// Whether a DistributedDataParallel reduces the gradient of one of `parameters`.
bool is_reduced_by_ddp(const std::vector<sharding::NamedTensor>& parameters);

}  // namespace tessera::zero
