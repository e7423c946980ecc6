#pragma once

#include "tessera/config.h"
#include "train/config_reader.h"

// One function a section of the config; later ones look at what earlier ones have read.

namespace tessera::train {

void read_model(MapReader keys, ModelConfig& model);
void read_data(MapReader keys, const ModelConfig& model, DataConfig& data);

/// Every key but `type` is an option of the registry's optimizer of that name, and is checked against it.
void read_optimizer(MapReader keys, OptimizerConfig& optimizer);
void read_scheduler(MapReader keys, SchedulerConfig& scheduler);

/// Options of another `parallel.type` are refused by name; backend and timeout belong to all.
void read_parallel(MapReader keys, ParallelConfig& parallel);

/// `config`: the sections read so far.
void read_train(MapReader keys, const Config& config, RunConfig& run);

}  // namespace tessera::train
