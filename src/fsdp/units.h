#pragma once

#include <string>
#include <vector>

#include "sharding/named_tensor.h"
#include "tessera/wrap_policy.h"

namespace tessera::fsdp {

/// Parameters that are gathered together. Indices into UnitPlan::parameters.
struct PlannedUnit {
  std::string name;   ///< "" for the root
  size_t parent = 0;  ///< The nearest unit around it; the root's is itself.
  std::vector<size_t> parameters;
};

struct UnitPlan {
  std::vector<sharding::NamedTensor> parameters;  ///< Each once, by its first name, in the module's
                                                  ///< order; those that are ignored are not there.
  std::vector<PlannedUnit>
      units;  ///< The root first, then in the module's order; all but the root have parameters.
};

/// Deals the parameters of `root` into units. A parameter of several modules (tied) belongs to the
/// nearest unit that holds all of these. UsageError for names to ignore that do not exist (with the
/// nearest).
UnitPlan plan_units(torch::nn::Module& root, const WrapPolicy& policy,
                    const std::vector<std::string>& ignored_modules,
                    const std::vector<std::string>& ignored_parameters);

}  // namespace tessera::fsdp
