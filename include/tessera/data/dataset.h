#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

/// The data of one step on one rank. Dimension 0 of each tensor counts the samples. CPU tensors.
struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
  std::map<std::string, at::Tensor> extra = {};  ///< Further tensors of a dataset, by name.
};

/// Samples that are read by number, as in PyTorch's map-style datasets; get() also collates them.
/// Every rank opens the same data and reads its own sample numbers (sampler.h). Nothing here
/// communicates.
class Dataset {
 public:
  virtual ~Dataset() = default;

  /// Number of samples in an epoch, > 0. Constructors of datasets refuse data without samples.
  virtual int64_t size() const = 0;
  /// The samples with these numbers, collated in the given order. Called from several threads at
  /// once. Every number ≥ 0 is valid: sample i is sample i mod size(), unless the dataset documents
  /// another rule. An empty list gives tensors with 0 rows. Throws UsageError for a negative
  /// number.
  virtual Batch get(const std::vector<int64_t>& samples) const = 0;
  /// Tokens in a sample, for reporting the throughput. 0: the samples are not token sequences.
  virtual int64_t tokens_per_sample() const { return 0; }
  /// A description in one line: kind, source and sizes.
  virtual std::string describe() const = 0;
};

}  // namespace tessera
#pragma GCC visibility pop
