#include <torch/torch.h>

#include <algorithm>

#include "data/permutation.h"
#include "tessera/data.h"
#include "tessera/error.h"

namespace tessera {
namespace {

void require_length(const Tokens& tokens, int64_t seq_len) {
  if (seq_len < 1) {
    throw UsageError("data: seq_len is " + std::to_string(seq_len) + ", expected at least 1");
  }
  if (tokens.size() - 1 < seq_len) {
    throw UsageError((tokens.source().empty() ? std::string("data") : tokens.source()) + ": " +
                     std::to_string(tokens.size()) + " tokens are too few for seq_len " + std::to_string(seq_len) +
                     ", which needs one more than that");
  }
}

// Sequences written row by row.
class BatchBuilder {
 public:
  BatchBuilder(int64_t count, int64_t seq_len)
      : batch_{at::empty({count, seq_len}, at::kLong), at::empty({count, seq_len}, at::kLong)},
        input_(batch_.inputs.data_ptr<int64_t>()),
        target_(batch_.targets.data_ptr<int64_t>()),
        seq_len_(seq_len) {}

  void add(const Tokens& tokens, int64_t start) {
    const int64_t period = tokens.size() - 1;
    int64_t position = start % period;
    for (int64_t k = 0; k < seq_len_; ++k) {
      *input_++ = tokens[position];
      *target_++ = tokens[position + 1];
      position = position + 1 == period ? 0 : position + 1;
    }
  }

  Batch take() { return batch_; }

 private:
  Batch batch_;
  int64_t* input_;
  int64_t* target_;
  int64_t seq_len_;
};

}  // namespace

TokenBatches::TokenBatches(Tokens tokens, const BatchOptions& options) : tokens_(std::move(tokens)), options_(options) {
  require_length(tokens_, options_.seq_len);
  if (options_.global_batch < 1) {
    throw UsageError("data: global_batch is " + std::to_string(options_.global_batch) + ", expected at least 1");
  }
}

int64_t TokenBatches::windows() const { return window_count(tokens_, options_.seq_len); }

int64_t TokenBatches::start(int64_t sequence) const {
  const int64_t period = tokens_.size() - 1;
  if (options_.order == BatchOptions::Order::sequential) {
    // The product overflows only after 2^63 tokens; reduced first, it never does.
    return static_cast<int64_t>(static_cast<unsigned __int128>(sequence) * static_cast<uint64_t>(options_.seq_len) %
                                static_cast<uint64_t>(period));
  }
  const auto count = static_cast<uint64_t>(windows());
  const uint64_t epoch = static_cast<uint64_t>(sequence) / count;
  const uint64_t window = permuted(static_cast<uint64_t>(sequence) % count, count, mixed(mixed(options_.seed) + epoch));
  return static_cast<int64_t>(window) * options_.seq_len;
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
  BatchBuilder builder(own, options_.seq_len);
  for (int64_t j = rank * own; j < (rank + 1) * own; ++j) {
    builder.add(tokens_, start(step * global + j));
  }
  return builder.take();
}

int64_t window_count(const Tokens& tokens, int64_t seq_len) {
  require_length(tokens, seq_len);
  return (tokens.size() - 1) / seq_len;
}

Batch window_batch(const Tokens& tokens, int64_t seq_len, int64_t first, int64_t count) {
  const int64_t windows = window_count(tokens, seq_len);
  if (first < 0 || first >= windows || count < 1) {
    throw UsageError("data: windows [" + std::to_string(first) + ", +" + std::to_string(count) + ") of " +
                     std::to_string(windows));
  }
  const int64_t end = first + std::min(count, windows - first);
  BatchBuilder builder(end - first, seq_len);
  for (int64_t window = first; window < end; ++window) {
    builder.add(tokens, window * seq_len);
  }
  return builder.take();
}

}  // namespace tessera
