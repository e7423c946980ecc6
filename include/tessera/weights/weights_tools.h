#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tessera/weights/weights.h"

// The work of `tessera weights`: weights without a model, one tensor at a time. All functions are
// local.

#pragma GCC visibility push(default)
namespace tessera {

/// XXH3 with 128 bits, in hexadecimal digits, of the tensor's elements in row-major order.
std::string weights_digest(const Weights& weights, const std::string& name);

struct ConvertOptions {
  /// The new dtype of floating-point tensors; none: no change. Other tensors do not change.
  std::optional<at::ScalarType> dtype = std::nullopt;
  /// As of SaveWeightsOptions; for folders.
  uint64_t max_shard_bytes = std::numeric_limits<uint64_t>::max();
};

/// Writes `from` to `to`, whose ending says the kind as in save_weights(). If both are folders, the
/// other files of the folder, such as config.json and those of the tokenizer, are copied, too, and
/// config.json gets the new dtype.
/// Throws UsageError if `to` is a file that is read, or a folder and `from` has no tensors, and if
/// finite values do not fit into the new dtype.
void convert_weights(const Weights& from, const std::string& to,
                     const ConvertOptions& options = {});

/// Copies the regular files of folder `from` that hold no weights to folder `to`, which exists, and
/// returns their names. Files of more than 100 MB, hidden files and folders are left out, and, with
/// a line in the log, links to files outside of `from`, except for those of Hugging Face's cache.
std::vector<std::string> copy_other_files(const std::string& from, const std::string& to);

struct TensorDifference {
  std::string name;
  /// "", "only in the first", "only in the second", "F32 [2, 3] and F32 [3, 2]", or, of a dtype
  /// that this libtorch lacks, how many bytes differ.
  std::string note;
  int64_t elements = 0;  ///< that differ; NaN equals NaN
  double largest = 0;    ///< greatest absolute difference, in double
};

/// Every tensor of the two, in order of the names. Tensors of the same shape are compared by value,
/// whatever their dtypes.
std::vector<TensorDifference> compare_weights(const Weights& first, const Weights& second);

}  // namespace tessera
#pragma GCC visibility pop
