#pragma once

#include "tessera/config.h"

// One function a section of the config; later ones look at what earlier ones have read.

namespace tessera::train {

/// All sections.
void read_config(OptionReader& keys, Config& config);

void read_optimizer(OptionReader keys, const ParallelConfig& parallel, OptimizerPlan& optimizer);
void read_parallel(OptionReader keys, ParallelConfig& parallel);
/// `config`: the sections read so far.
void read_train(OptionReader keys, const Config& config, RunConfig& run);
void read_checkpoint(OptionReader keys, CheckpointConfig& checkpoint);

}  // namespace tessera::train
