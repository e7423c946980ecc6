#include "tessera/data/token_dataset.h"

#include <algorithm>

#include <torch/types.h>

#include "data/sample_numbers.h"
#include "tessera/error.h"

namespace tessera {

TokenDataset::TokenDataset(Tokens tokens, int64_t seq_len, bool continuous)
    : tokens_(std::move(tokens)), seq_len_(seq_len), continuous_(continuous) {
  if (seq_len_ < 1)
    throw UsageError("data: seq_len is " + std::to_string(seq_len_) + ", expected at least 1");
  if (tokens_.size() - 1 < seq_len_) {
    throw UsageError((tokens_.source().empty() ? std::string("data") : tokens_.source()) + ": " +
                     std::to_string(tokens_.size()) + " tokens are too few for seq_len " +
                     std::to_string(seq_len_) + ", which needs one more than that");
  }
}

int64_t TokenDataset::start(int64_t sample) const {
  if (!continuous_) return sample % size() * seq_len_;
  // The product may exceed 64 bits.
  return static_cast<int64_t>(static_cast<unsigned __int128>(sample) *
                              static_cast<uint64_t>(seq_len_) %
                              static_cast<uint64_t>(tokens_.size() - 1));
}

Batch TokenDataset::get(const std::vector<int64_t>& samples) const {
  const auto count = static_cast<int64_t>(samples.size());
  Batch batch{at::empty({count, seq_len_}, at::kLong), at::empty({count, seq_len_}, at::kLong)};
  int64_t* input = batch.inputs.data_ptr<int64_t>();
  int64_t* target = batch.targets.data_ptr<int64_t>();
  const int64_t period = tokens_.size() - 1;
  for (const int64_t sample : samples) {
    require_sample_number("TokenDataset", sample);
    int64_t position = start(sample);
    for (int64_t left = seq_len_; left > 0;) {
      const int64_t run = std::min(left, period - position);
      tokens_.read(position, run, input);
      tokens_.read(position + 1, run, target);
      input += run;
      target += run;
      left -= run;
      position = 0;  // of the next run, if any
    }
  }
  return batch;
}

std::string TokenDataset::describe() const {
  return "TokenDataset: " + (tokens_.source().empty() ? std::string("tokens") : tokens_.source()) +
         ": " + std::to_string(tokens_.size()) + " tokens, " + std::to_string(size()) +
         " sequences of " + std::to_string(seq_len_) + (continuous_ ? ", continuous" : "");
}

}  // namespace tessera
