#pragma once

#include <functional>

#include "tessera/train.h"
#include "train/watch/heartbeat.h"

namespace tessera::train {

/// Trains to the end. A rolled-back run starts again from the last sound checkpoint of its folder
/// or from the beginning, and leaves out the steps that caused the rollback. Calls `on_start` each
/// time when a run is ready for its first step. AgreedError on all ranks if it would leave out more
/// than train.nonfinite_limit steps in a row. `heartbeat` gets the current work of the run.
/// Collective; blocks.
TrainResult run_with_rollbacks(const Config& config, ProcessGroup group, Heartbeat& heartbeat,
                               const std::function<void()>& on_start);

}  // namespace tessera::train
