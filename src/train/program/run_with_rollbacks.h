#pragma once

#include <functional>

#include "tessera/train.h"
#include "train/watch/heartbeat.h"

namespace tessera::train {

/// Trains to the end. A run that is to be rolled back is made again, from the last sound checkpoint
/// of its folder or from the beginning, and leaves the steps out that were the reason. Calls
/// `on_start` each time when a run is ready for its first step. AgreedError on all ranks if more
/// than train.nonfinite_limit steps in a row are to be left out. `heartbeat` is told what the run
/// does. Collective; blocks.
TrainResult run_with_rollbacks(const Config& config, ProcessGroup group, Heartbeat& heartbeat,
                               const std::function<void()>& on_start);

}  // namespace tessera::train
