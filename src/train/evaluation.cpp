#include "train/evaluation.h"

#include <algorithm>

namespace tessera::train {
namespace {

constexpr int64_t kChunkWindows = 8;

}  // namespace

double evaluate(GPT2Impl& model, const Tokens& tokens, int64_t seq_len, int64_t max_windows, ProcessGroup group) {
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
    for (int64_t chunk = group.rank(); chunk < chunks; chunk += group.size()) {
      const int64_t first = chunk * kChunkWindows;
      const int64_t count = std::min(kChunkWindows, windows - first);
      const Batch batch = window_batch(tokens, seq_len, first, count);
      sums.data_ptr<double>()[chunk] =
          model.loss(batch.inputs, batch.targets).item<double>() * static_cast<double>(count);
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
