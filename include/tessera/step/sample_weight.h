#pragma once

#include <cstdint>

#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

/// The factor of this rank's loss where ranks have different numbers of samples in a step. The loss
/// is a mean over the rank's `samples`; with the factor, every wrapper's mean of the gradients over
/// the ranks is the mean over the samples of all ranks:
///
///     (torch::mse_loss(net(x), y) * tessera::sample_weight(world, x.size(0))).backward();
///
/// The factor is W n / N for W ranks, n samples here and N on all ranks. Equal numbers give 1. A
/// rank without samples gets 0, and calls forward and backward with any sample; where N is 0, all
/// get 0. With gradient accumulation, call it once a step with the samples of all micro-batches of
/// the rank, and also multiply the loss of each micro-batch by its share of these samples.
///
/// `group`: that of the wrapper. Collective, one all-reduce of 16 bytes; blocks. Throws UsageError
/// on every rank if a number is negative.
double sample_weight(ProcessGroup group, int64_t samples);

}  // namespace tessera
#pragma GCC visibility pop
