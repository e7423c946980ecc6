#include "train/evaluation.h"

#include <algorithm>

namespace tessera::train {
namespace {

constexpr int64_t kChunkWindows = 8;

}  // namespace

double evaluate(torch::nn::Module& model, const std::function<at::Tensor(const Batch&)>& loss, const Tokens& tokens, int64_t seq_len,
                int64_t max_windows, ProcessGroup group) {
  int64_t windows = window_count(tokens, seq_len);
  if (max_windows > 0) {
    windows = std::min(windows, max_windows);
  }
  const int64_t chunks = (windows + kChunkWindows - 1) / kChunkWindows;
  at::Tensor sums = at::zeros({chunks}, at::kDouble);
  const bool was_training = model.is_training();
  model.eval();
  {
    torch::NoGradGuard no_grad;
    for (int64_t round = 0; round < chunks; round += group.size()) {
      // A rank without a chunk in the last round takes part with another's, which does not count.
      const int64_t chunk = std::min(round + group.rank(), chunks - 1);
      const int64_t first = chunk * kChunkWindows;
      const int64_t count = std::min(kChunkWindows, windows - first);
      const double mean = loss(window_batch(tokens, seq_len, first, count)).item<double>();
      if (round + group.rank() < chunks) {
        sums.data_ptr<double>()[chunk] = mean * static_cast<double>(count);
      }
    }
  }
  model.train(was_training);
  group.all_reduce(sums);
  double total = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    total += sums.data_ptr<double>()[chunk];
  }
  return total / static_cast<double>(windows);
}

}  // namespace tessera::train
