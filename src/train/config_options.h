#pragma once

#include "tessera/config.h"
#include "train/config_reader.h"

// The sections whose keys depend on a type chosen by name.

namespace tessera::train {

/// Every key but `type` is an option of the registry's optimizer of that name, and is checked against it.
void read_optimizer(MapReader keys, OptimizerConfig& optimizer);

/// Options of another `parallel.type` are refused by name; backend and timeout belong to all.
void read_parallel(MapReader keys, ParallelConfig& parallel);

}  // namespace tessera::train
