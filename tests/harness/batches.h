#pragma once

#include <torch/types.h>

// Deterministic inputs for the models of harness/models.h, and the loss that the tests use.

namespace tessera::testing {

/// The `rank`-th of `world` equal parts of `batch` along dimension 0.
inline at::Tensor part_of(const at::Tensor& batch, int rank, int world) {
  const int64_t size = batch.size(0) / world;
  return batch.narrow(0, size * rank, size);
}

/// The same random batch on every call with the same arguments.
inline at::Tensor random_batch(at::IntArrayRef sizes, int seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed)));
}

/// Step `step`'s batch of 12 rows of 3 numbers, of which `rank` takes its part. 12 is divisible by
/// world sizes 1, 2, 3 and 4.
inline at::Tensor rows(int step, int rank = 0, int world = 1) {
  return part_of(random_batch({12, 3}, 100 + step), rank, world);
}

/// As rows(), but each rank has a batch of its own: 4 rows that no other rank and no other step
/// has.
inline at::Tensor own_rows(int step, int rank) {
  return random_batch({4, 3}, 100 + 10 * step + rank);
}

/// As rows(), 12 images of 2 channels and 4 x 4 pixels, for Mixed.
inline at::Tensor images(int step, int rank = 0, int world = 1) {
  return part_of(random_batch({12, 2, 4, 4}, 200 + step), rank, world);
}

/// As rows(), 12 images of 3 channels and 6 x 6 pixels.
inline at::Tensor rgb_images(int step, int rank = 0, int world = 1) {
  return part_of(random_batch({12, 3, 6, 6}, 100 + step), rank, world);
}

inline at::Tensor loss_of(const at::Tensor& y) { return (y - 0.5).square().mean(); }

}  // namespace tessera::testing
