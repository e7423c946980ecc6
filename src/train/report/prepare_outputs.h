#pragma once

#include <string>

#include "tessera/train/config.h"

namespace tessera::train {

/// Makes the folders of `train.log` and `train.save` and proves that they can be written, and that
/// they replace neither each other nor what the run reads, before anything is trained. Throws
/// UsageError naming the key. For the rank that writes.
void prepare_outputs(const Config& config);

}  // namespace tessera::train
