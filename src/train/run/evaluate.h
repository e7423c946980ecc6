#pragma once

#include <functional>
#include <map>
#include <string>

#include "tessera/data/dataset.h"
#include "tessera/train/model_wrapper.h"

namespace tessera::train {

/// The means of every figure of the model over the first `max_samples` samples (0: all); "loss" is
/// the sum of its losses. The module is in evaluation mode during the call. The result is
/// bit-identical for any number of ranks. `on_round` is called before each forward. Collective.
std::map<std::string, double> evaluate(ModelWrapper& model, const Dataset& data,
                                       int64_t max_samples, const std::function<void()>& on_round);

}  // namespace tessera::train
