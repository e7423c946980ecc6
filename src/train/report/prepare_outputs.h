#pragma once

#include <string>

#include "tessera/train/config.h"

namespace tessera::train {

/// Creates the folders of `train.log` and `train.save` and checks, before training, that the files
/// can be written and overwrite neither each other nor a file that the run reads. Throws UsageError
/// that names the key. Call it on the rank that writes.
void prepare_outputs(const Config& config);

}  // namespace tessera::train
