#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torch/types.h>

namespace tessera {

/// What one step of one rank is given: samples along dimension 0 of each tensor, on the CPU.
struct Batch {
  at::Tensor inputs;
  at::Tensor targets;
  std::map<std::string, at::Tensor> extra = {};  ///< whatever else a dataset hands over, by name
};

/// Samples that are fetched by number. Every rank opens the same data and takes its own numbers
/// (sampler.h): nothing here communicates. As in PyTorch's map-style datasets, collation included.
class Dataset {
 public:
  virtual ~Dataset() = default;

  /// Samples of an epoch, > 0: a constructor refuses data that has none.
  virtual int64_t size() const = 0;
  /// These samples, collated in the order given. Called from several threads at once. Any number ≥
  /// 0 is a sample; from size() on they begin anew (sample i is sample i mod size()) unless the
  /// dataset says otherwise. No samples give tensors of no rows. Throws UsageError on a negative
  /// number.
  virtual Batch get(const std::vector<int64_t>& samples) const = 0;
  /// For throughput in tokens; 0: samples are no token sequences.
  virtual int64_t tokens_per_sample() const { return 0; }
  /// One line for people: the kind, the source, the sizes.
  virtual std::string describe() const = 0;
};

}  // namespace tessera
