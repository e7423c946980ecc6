#pragma once

#include "tessera/optim.h"

#pragma GCC visibility push(default)
namespace tessera {

/// A factory of optimizers for bfloat16 and float16 parameters that are updated in float32
/// (Micikevicius et al., 2018). Each such parameter has a float32 copy, its master weight. step()
/// converts the gradients to float32, the optimizer of `factory` updates the copies, and each
/// parameter gets its copy's values, rounded. Parameters of other dtypes are updated as without it.
/// For a plain loop, DistributedDataParallel, DistributedOptimizer, ZeroRedundancyOptimizer (each
/// rank has the copies of its shards) and FullyShardedDataParallel.
///
///   ZeroRedundancyOptimizer optimizer(
///       *net, group, with_master_weights(default_optimizers().factory("AdamW", {{"lr", 1e-3}})));
///
/// The copies begin as the values of the parameters. Where a program has written other values to a
/// parameter since the last step, such as loaded weights, its copy takes these, element by element.
/// A parameter's state is that of the optimizer, in float32, and "master", its copy. A state
/// without "master" that is loaded keeps the copy's values. Memory: 4 bytes an element for the
/// copies, and within step() 4 bytes for the gradients in float32.
///
/// The optimizer evaluates a closure once a step. All functions are local. Calling the factory
/// throws UsageError for an optimizer that evaluates it more often (LBFGS).
OptimizerFactory with_master_weights(OptimizerFactory factory);

}  // namespace tessera
#pragma GCC visibility pop
