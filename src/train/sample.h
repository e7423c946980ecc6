#pragma once

#include <string>

#include "tessera/config.h"
#include "tessera/models/gpt2.h"

namespace tessera::train {

/// The prompt and what the model goes on with: as text when tokens are `bytes` (what no terminal should see escaped as
/// \xNN), else as numbers. Local; the model's parameters are whole.
std::string sample_text(GPT2Impl& model, const SampleConfig& sample, bool bytes);

}  // namespace tessera::train
