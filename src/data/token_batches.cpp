#include <algorithm>

#include "tessera/data.h"
#include "tessera/error.h"

namespace tessera {

TokenBatches::TokenBatches(Tokens tokens, const BatchOptions& options)
    : options_(options),
      dataset_(std::move(tokens), options.seq_len, options.order == SampleOrder::sequential),
      sampler_(dataset_.size(), options.order, options.seed) {
  if (options_.global_batch < 1) {
    throw UsageError("data: global_batch is " + std::to_string(options_.global_batch) + ", expected at least 1");
  }
}

Batch TokenBatches::batch(int64_t step, int rank, int world) const {
  const int64_t global = options_.global_batch;
  if (step < 0 || world < 1 || rank < 0 || rank >= world) {
    throw UsageError("data: batch of step " + std::to_string(step) + ", rank " + std::to_string(rank) + " of " +
                     std::to_string(world));
  }
  if (global % world != 0) {
    throw UsageError("data: global_batch is " + std::to_string(global) + ", which " + std::to_string(world) +
                     " ranks do not divide");
  }
  const int64_t own = global / world;
  return dataset_.get(sampler_.samples(step * global + rank * own, own));
}

int64_t window_count(const Tokens& tokens, int64_t seq_len) { return TokenDataset(tokens, seq_len, false).size(); }

Batch window_batch(const Tokens& tokens, int64_t seq_len, int64_t first, int64_t count) {
  const TokenDataset dataset(tokens, seq_len, false);
  const int64_t windows = dataset.size();
  if (first < 0 || first >= windows || count < 1) {
    throw UsageError("data: windows [" + std::to_string(first) + ", +" + std::to_string(count) + ") of " +
                     std::to_string(windows));
  }
  return dataset.get(Sampler(windows, SampleOrder::sequential).samples(first, std::min(count, windows - first)));
}

}  // namespace tessera
