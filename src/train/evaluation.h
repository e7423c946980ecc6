#pragma once

#include "tessera/data.h"
#include "tessera/models/gpt2.h"
#include "tessera/process_group.h"

namespace tessera::train {

/// Mean loss over the first `max_windows` (0: all) non-overlapping windows of `tokens`. Windows are dealt out in chunks
/// of a fixed size and summed in their order, so that the figure is bit-identical for any world size. A collective.
double evaluate(GPT2Impl& model, const Tokens& tokens, int64_t seq_len, int64_t max_windows, ProcessGroup group);

}  // namespace tessera::train
