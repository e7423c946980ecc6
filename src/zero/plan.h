#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sharding/named_tensor.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::zero {

/// An optimizer of one parameter.
std::unique_ptr<torch::optim::Optimizer> example_of(const OptimizerFactory& factory);
/// True if an update of one parameter depends on the others, so that one rank needs all of them.
bool uses_all_parameters(const OptimizerFactory& factory);
/// True if a DistributedDataParallel reduces the gradient of one of `parameters`.
bool is_reduced_by_ddp(const std::vector<sharding::NamedTensor>& parameters);

/// The facts, beside the options, on which the choice of mechanisms depends. The same on all ranks.
struct Setting {
  int ranks = 1;
  bool messages_between_hosts = false;  ///< Of ProcessGroup.
  bool on_cpu = true;                   ///< All parameters are.
  bool ddp_reduces = false;             ///< A DistributedDataParallel reduces the gradients.
  bool uses_all_parameters = false;     ///< An update of one parameter depends on the others.
  bool checks_results = false;          ///< Of ProcessGroupOptions.
};

Setting setting_of(const ProcessGroup& group, const OptimizerFactory& factory,
                   const std::vector<sharding::NamedTensor>& parameters);

/// The mechanisms that an optimizer uses.
struct Plan {
  ZeroRedundancyOptimizerOptions options;  ///< Those that have an effect.
  bool early = false;                      ///< [Note: reduction within backward]
  bool in_background = false;              ///< [Note: pages that arrive in the background]
  bool detects = false;                    ///< Needs the detection of the use of parameters.
  std::vector<std::string> notes;          ///< For the log: options with less effect, and why.
};

/// The rules between options, in one table. UsageError with `prefix` for options that exclude each
/// other; less overlap than an option asks for is never an error. Local.
Plan plan_zero(const ZeroRedundancyOptimizerOptions& options, const Setting& setting,
               const std::string& prefix);

}  // namespace tessera::zero
