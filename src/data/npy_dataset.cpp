#include "tessera/data/npy_dataset.h"

#include <torch/types.h>

#include "data/npy_header.h"
#include "data/sample_numbers.h"
#include "data/shape_text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool is_floating(NpyArray::Type type) { return name_of(type)[0] == 'f'; }

std::string shown(const NpyArray& array) {
  return array.path + " (" + name_of(array.type) + " " + shape_text(array.shape) + ")";
}

}  // namespace

NpyDataset::NpyDataset(const NpyOptions& options)
    : inputs_(NpyArray::open(options.inputs)), targets_(NpyArray::open(options.targets)) {
  if (inputs_.shape[0] != targets_.shape[0]) {
    throw UsageError("NpyDataset: " + targets_.path + ": " + std::to_string(targets_.shape[0]) +
                     " targets for the " + std::to_string(inputs_.shape[0]) + " inputs of " +
                     inputs_.path);
  }
}

Batch NpyDataset::get(const std::vector<int64_t>& samples) const {
  const std::vector<int64_t> rows = rows_of_samples("NpyDataset", samples, size());
  return {inputs_.gather(rows, at::kFloat),
          targets_.gather(rows, is_floating(targets_.type) ? at::kFloat : at::kLong)};
}

std::string NpyDataset::describe() const {
  return "NpyDataset: " + shown(inputs_) + ", " + shown(targets_);
}

}  // namespace tessera
