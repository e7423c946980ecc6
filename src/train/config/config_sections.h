#pragma once

#include "tessera/train/config.h"

// One function a section of the config; later ones look at what earlier ones have read.

namespace tessera::train {

/// All sections.
void read_config(OptionReader& keys, Config& config);

void read_optimizer(OptionReader& keys, const ParallelConfig& parallel, OptimizerPlan& optimizer);
/// `config`: the sections read so far.
void read_train(OptionReader& keys, const Config& config, RunConfig& run);
void read_checkpoint(OptionReader& keys, CheckpointConfig& checkpoint);

// The keys of a section that do not depend on a type, for the reference.
void describe_top_level(OptionReader& keys);
void describe_model(OptionReader& keys);
void describe_data(OptionReader& keys);
void describe_paramwise(OptionReader& keys);
void describe_parallel(OptionReader& keys);

}  // namespace tessera::train
