#pragma once

#include <map>
#include <string>

#include "tessera/data/dataset.h"
#include "tessera/train/model_wrapper.h"

namespace tessera::train {

/// Means over the first `max_samples` samples (0: all) of every figure that the model gives, "loss"
/// being the sum of its losses. The module is in evaluation mode meanwhile. The result does not
/// depend, in any bit, on the number of ranks. A collective.
std::map<std::string, double> evaluate(ModelWrapper& model, const Dataset& data,
                                       int64_t max_samples);

}  // namespace tessera::train
