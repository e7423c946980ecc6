#pragma once

#include <string>

#include "tessera/train/config.h"

namespace tessera::train {

/// Generated text, including its prompt. `bytes`: tokens are bytes and are shown as text, with \xNN
/// for bytes that are not printable; otherwise tokens are shown as numbers.
std::string sample_text(const TrainedModel& model, const SampleConfig& sample, bool bytes);

}  // namespace tessera::train
