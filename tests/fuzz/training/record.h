#pragma once

#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

#include "tessera/module_state_dict.h"
#include "tessera/optim/optimizer_state_dict.h"

namespace tessera::fuzz {

/// What one rank sees in an event: named tensors, compared between plain training and a wrapper.
using Record = std::vector<std::pair<std::string, at::Tensor>>;

/// Complex numbers as pairs, in the last dimension; other tensors as they are.
at::Tensor as_pairs(const at::Tensor& tensor);

void add_number(Record& record, const std::string& name, double value);
void add_weights(Record& record, const ModuleStateDict& weights);
void add_state(Record& record, const OptimizerStateDict& state);

/// Empty if both are equal; otherwise the first difference. `tolerance` 0: every bit, and NaN
/// equals NaN. Else |a - b| <= tolerance * (1 + |b|). Names that begin with "norm" may differ by
/// rounding in any case.
std::string difference(const Record& actual, const Record& expected, double tolerance);

}  // namespace tessera::fuzz
