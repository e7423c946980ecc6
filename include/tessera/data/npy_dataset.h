#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"
#include "tessera/data/npy_array.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Paths of two arrays (npy_array.h). Dimension 0 of each counts the samples.
struct NpyOptions {
  std::string inputs;
  std::string targets;
};

/// Inputs are float32 [B, …]. Targets are int64 [B, …] if the array holds integers or bools, and
/// float32 [B, …] if it holds floating-point numbers.
class NpyDataset : public Dataset {
 public:
  /// Throws UsageError as NpyArray::open() does, and if the numbers of samples differ.
  explicit NpyDataset(const NpyOptions& options);

  int64_t size() const override { return inputs_.shape[0]; }
  Batch get(const std::vector<int64_t>& samples) const override;
  std::string describe() const override;

  const NpyArray& inputs() const { return inputs_; }
  const NpyArray& targets() const { return targets_; }

 private:
  NpyArray inputs_, targets_;
};

}  // namespace tessera
#pragma GCC visibility pop
