#pragma once

#include <string>

#include "tessera/train/config.h"

namespace tessera::train {

/// Generated text, its prompt included: bytes as text (what is not printable as \xNN), other tokens
/// as numbers.
std::string sample_text(const TrainedModel& model, const SampleConfig& sample, bool bytes);

}  // namespace tessera::train
