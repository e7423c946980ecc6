#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tessera/train/model_wrapper.h"

namespace tessera::train {

/// The distribution of a tensor's finite elements. counts[i] are those above limits[i - 1] and up
/// to limits[i].
struct Histogram {
  double min = 0, max = 0, count = 0, sum = 0, sum_of_squares = 0;
  std::vector<double> limits, counts;
};

/// The histograms of all parameters that are trained, by name, on rank 0; empty on other ranks.
/// Each rank counts the elements of the shards that it saves, and one all-reduce adds the counts,
/// so no parameter is gathered. The limits are those of TensorFlow: zero and ±1e-12 · 1.1^i.
/// Collective.
std::vector<std::pair<std::string, Histogram>> parameter_histograms(ModelWrapper& model);

}  // namespace tessera::train
