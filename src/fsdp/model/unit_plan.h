#pragma once

#include <string>
#include <vector>

#include "sharding/named_tensor.h"
#include "tessera/wrap_policy.h"

namespace tessera::fsdp {

/// Parameters that are gathered together.
struct PlannedUnit {
  std::string name;   ///< Path of its module; "" for the root.
  size_t parent = 0;  ///< Index of the nearest unit that contains it; the root's own for the root.
  std::vector<size_t> parameters;  ///< Indices into UnitPlan::parameters.
};

struct UnitPlan {
  /// Each parameter that is not ignored once, by its first name, in the module's order.
  std::vector<sharding::NamedTensor> parameters;
  /// The root first, then in the module's order. All except the root have parameters.
  std::vector<PlannedUnit> units;
};

/// Assigns the parameters of `root` to units. A parameter of several modules (tied) belongs to the
/// nearest unit that contains all of them. UsageError for an ignored name that does not exist, with
/// the most similar name. Local.
UnitPlan plan_units(torch::nn::Module& root, const WrapPolicy& policy,
                    const std::vector<std::string>& ignored);

}  // namespace tessera::fsdp
