#pragma once

#include <torch/optim/optimizer.h>

#include "tessera/data/dataset.h"
#include "tessera/process_group.h"
#include "tessera/train/config.h"

// Options and data that must be equal on all ranks before the first step. With unequal options or
// data, the ranks would train a mixture that no single run could train.

namespace tessera::train {

/// UsageError on all ranks if a value in effect of the config differs between ranks. The message
/// names each value and its ranks for the first key that differs. These keys may differ: train.log,
/// train.log_every, data.loader_threads, data.prefetch. Collective.
void check_same_config(const Config& config, ProcessGroup& group);

/// UsageError on all ranks if a split of the data has another size on some rank, or other samples:
/// of samples spread over the split, the tensors' names, dtypes, shapes and bytes are compared. The
/// bytes are left out where two reads on one rank give different ones, as random augmentations do.
/// Collective.
void check_same_data(const Config& config, const DataSplits& data, ProcessGroup& group);

/// UsageError on all ranks if an option of a parameter group differs between ranks. Collective.
void check_same_options(const ModelSections& config, torch::optim::Optimizer& optimizer,
                        ProcessGroup& group);

}  // namespace tessera::train
