#pragma once

#include "tessera/data.h"
#include "tessera/process_group.h"

#include <functional>

namespace tessera::train {

/// Mean loss over the first `max_windows` (0: all) non-overlapping windows of `tokens`. Windows are dealt out in chunks
/// of a fixed size and summed in their order, so that the figure is bit-identical for any world size. `loss` is called equally often on all ranks.
/// A collective.
double evaluate(torch::nn::Module& model, const std::function<at::Tensor(const Batch&)>& loss, const Tokens& tokens, int64_t seq_len, int64_t max_windows, ProcessGroup group);

}  // namespace tessera::train
