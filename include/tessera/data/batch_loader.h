#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/data/dataset.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Returns dataset.get(samples). Throws UsageError, naming the dataset and the tensor, unless
/// `inputs`, `targets` and `extra` have one row a sample. The last two may be undefined. Local.
Batch load_batch(const Dataset& dataset, const std::vector<int64_t>& samples);

struct BatchLoaderOptions {
  int threads = 1;  ///< Loading threads, ≥ 1. Each loads a whole batch at a time.
  int depth = 2;  ///< Batches loaded or being loaded ahead of next(), ≥ 0. 0: next() loads in the
                  ///< caller's thread.
};

/// Loads the batches of iterations [first_iteration, end_iteration) in background threads and
/// returns them in the order of the iterations, for any number of threads.
///
/// The loading threads run without autograd. Each uses one thread of libtorch's pool (where that
/// pool is OpenMP's), so that loading does not take cores from training. The settings of the
/// caller's thread do not change.
class BatchLoader {
 public:
  /// `samples_of(i)` returns the samples that this rank takes in iteration i. It and the dataset's
  /// get() are called from several threads at once. Loading starts immediately. Throws UsageError
  /// if an option is out of range, first_iteration > end_iteration, first_iteration < 0, or dataset
  /// or samples_of is null.
  BatchLoader(std::shared_ptr<const Dataset> dataset,
              std::function<std::vector<int64_t>(int64_t iteration)> samples_of,
              int64_t first_iteration, int64_t end_iteration,
              const BatchLoaderOptions& options = {});
  /// Waits for the batches that are being loaded. Starts no further ones.
  ~BatchLoader();
  BatchLoader(const BatchLoader&) = delete;
  BatchLoader& operator=(const BatchLoader&) = delete;

  /// Returns the batch of iteration(), as load_batch() does. Blocks until it is loaded. If the
  /// dataset or samples_of threw for this iteration, next() throws that error with the iteration in
  /// front of its text: a UsageError as UsageError, every other exception as Error. The next call
  /// continues with the following iteration. Throws UsageError if no iteration is left. Must be
  /// called from one thread.
  Batch next();

  /// The iteration whose batch next() will return; end_iteration if none is left.
  int64_t iteration() const;
  /// Seconds that next() has waited so far. Near 0 means that loading keeps up with training. With
  /// depth 0 it is the time spent loading.
  double waited() const;

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#pragma GCC visibility pop
