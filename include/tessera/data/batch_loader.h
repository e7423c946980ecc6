#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/data/dataset.h"

namespace tessera {

struct BatchLoaderOptions {
  int threads = 1;  ///< that load, each a whole batch at a time; ≥ 1
  int depth = 2;    ///< batches loaded or being loaded ahead of next(); 0: next() loads in the
                    ///< caller's thread
};

/// Loads the batches of iterations [first_iteration, end_iteration) in the background and hands
/// them out strictly in order, whatever number of threads loads them.
///
/// The threads run without autograd and with one thread of libtorch's pool each (where its pool is
/// OpenMP's), so that they do not compete with training for it; the caller's thread keeps its own
/// settings.
class BatchLoader {
 public:
  /// `samples_of(i)`: the samples that this rank takes in iteration i. It and the dataset's get()
  /// are called from several threads at once. Loading begins at once. Throws UsageError when an
  /// option is out of range, the range of iterations is reversed, or there is no dataset.
  BatchLoader(std::shared_ptr<const Dataset> dataset,
              std::function<std::vector<int64_t>(int64_t iteration)> samples_of,
              int64_t first_iteration, int64_t end_iteration,
              const BatchLoaderOptions& options = {});
  /// Waits for the batches that are being loaded, no further ones are begun.
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  /// The batch of iteration(); waits until it is loaded. What dataset or samples_of threw for it is
  /// thrown here, its text preceded by the iteration (UsageError as UsageError, all else as Error);
  /// the next call is about the iteration after it. Throws UsageError when no iteration is left.
  /// For one thread.
  Batch next();

  /// The iteration that next() will give; end_iteration when none is left.
  int64_t iteration() const;
  /// Seconds that next() has waited so far: near 0 when loading keeps up. With depth 0, the time of
  /// loading.
  double waited() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
