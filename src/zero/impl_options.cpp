// The rules by which options of a ZeroRedundancyOptimizer exclude each other, and the groups that
// follow from them.
#include <algorithm>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/optim/lbfgs.h>

#include "sharding/detection/detection.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "zero/impl.h"
#include "zero/options.h"

namespace tessera {

namespace zero {

std::unique_ptr<torch::optim::Optimizer> example_of(const OptimizerFactory& factory) {
  return factory({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{at::zeros({1})})});
}

bool uses_all_parameters(const OptimizerFactory& factory) {
  return dynamic_cast<torch::optim::LBFGS*>(example_of(factory).get()) != nullptr;
}

namespace {
constexpr const char* kDdp = "DistributedDataParallel";
}

bool is_reduced_by_ddp(const std::vector<sharding::NamedTensor>& parameters) {
  return sharding::WrappedParameters::reducer_of(parameters) == kDdp;
}

}  // namespace zero

namespace {

std::vector<sharding::NamedTensor> parameters_of(
    const std::vector<ZeroRedundancyOptimizer::Group>& groups) {
  std::vector<sharding::NamedTensor> all;
  for (const auto& group : groups) {
    for (const auto& [name, tensor] : group.parameters) all.push_back({name, tensor});
  }
  return all;
}

}  // namespace

ZeroRedundancyOptimizerOptions ZeroRedundancyOptimizer::Impl::beside_others(
    Options options, const std::vector<Group>& groups, int rank) {
  if (!options.reduce_gradients || !zero::is_reduced_by_ddp(parameters_of(groups))) return options;
  if (rank == 0) {
    spdlog::info("tessera: {}: {} reduces the gradients, so reduce_gradients is off here", kName,
                 zero::kDdp);
  }
  options.reduce_gradients = false;
  return options;
}

/// The group of the gradients' collectives: for reductions within backward another one than that of
/// the step's collectives. Collective.
ProcessGroup ZeroRedundancyOptimizer::Impl::group_of_gradients(const OptimizerFactory& factory,
                                                               const std::vector<Group>& groups) {
  agree(group, [&] {
    check_wire(factory, groups);
    check_sharding(factory, groups);
    check_sharing(factory, groups);
  });
  return early ? group.duplicate() : group;
}

/// The group of the parameters' gathers, if they travel encoded. Collective.
std::optional<ProcessGroup> ZeroRedundancyOptimizer::Impl::group_of_parameters() {
  auto encoded = group.with_wire(options.wire.parameters);
  if (encoded.impl() == group.impl()) return std::nullopt;
  return encoded;
}

/// The group of gathers in the background, where that of the gradients rounds what it moves.
/// Collective.
std::optional<ProcessGroup> ZeroRedundancyOptimizer::Impl::group_of_background_gathers() {
  if (!in_background || !encodes_gradients()) return std::nullopt;
  return group.duplicate();
}

bool ZeroRedundancyOptimizer::Impl::encodes_gradients() const {
  return options.wire.gradients != WireFormat::float32 && !group.same_host();
}

void ZeroRedundancyOptimizer::Impl::check_wire(const OptimizerFactory& factory,
                                               const std::vector<Group>& groups) const {
  const auto& wire = options.wire;
  const auto refuse = [&](const char* name, WireFormat format, const char* reason) {
    throw UsageError(
        fmt::format("{}: option wire.{} is {}, and {}", prefix(), name, to_string(format), reason));
  };
  if (wire.gradients != WireFormat::float32 && !options.reduce_gradients) {
    refuse("gradients", wire.gradients,
           "the gradients are reduced elsewhere; expected the option there");
  }
  if (wire.parameters != WireFormat::float32) {
    if (!options.parameters_as_bucket_view)
      refuse("parameters", wire.parameters, "it needs parameters_as_bucket_view");
    if (zero::uses_all_parameters(factory)) {
      refuse("parameters", wire.parameters,
             "this optimizer evaluates the loss within an update; expected float32");
    }
  }
  sharding::check_wire_dtypes(kName, group.rank(), wire, parameters_of(groups));
}

/// [Note: sharded gradients]
void ZeroRedundancyOptimizer::Impl::check_sharding(const OptimizerFactory& factory,
                                                   const std::vector<Group>& groups) const {
  if (!options.shard_gradients) return;
  const auto refuse = [&](const char* reason) {
    throw UsageError(fmt::format("{}: option shard_gradients {}", prefix(), reason));
  };
  const auto all = parameters_of(groups);
  if (zero::is_reduced_by_ddp(all))
    refuse(
        "excludes DistributedDataParallel, which reduces the same gradients; expected one of the "
        "two");
  if (!options.reduce_gradients) refuse("needs reduce_gradients; expected it on");
  if (options.reduce_in_place)
    refuse("keeps no gradient that a mean could replace; expected reduce_in_place off");
  if (zero::uses_all_parameters(factory))
    refuse("needs an optimizer that does not use all parameters at once");
  sharding::require_detection(prefix() + ": option shard_gradients", "the option off");
}

/// [Note: one copy a host]
void ZeroRedundancyOptimizer::Impl::check_sharing(const OptimizerFactory& factory,
                                                  const std::vector<Group>& groups) const {
  if (!options.share_parameters) return;
  const auto refuse = [&](const char* reason) {
    throw UsageError(fmt::format("{}: option share_parameters {}", prefix(), reason));
  };
  if (!options.parameters_as_bucket_view) refuse("needs parameters_as_bucket_view");
  if (options.gather_in_background)
    refuse(
        "excludes gather_in_background, which takes memory from parameters; expected one of "
        "the two");
  if (options.wire.parameters != WireFormat::float32)
    refuse("needs parameters that travel unrounded; expected wire.parameters float32");
  if (zero::uses_all_parameters(factory))
    refuse("needs an optimizer that does not use all parameters at once");
  const auto parameters = parameters_of(groups);
  if (std::any_of(parameters.begin(), parameters.end(),
                  [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); }))
    refuse("needs parameters on the CPU");
  if (group.size() > 1)
    sharding::require_detection(prefix() + ": option share_parameters", "the option off");
}

/// [Note: reduction within backward]
bool ZeroRedundancyOptimizer::Impl::reduces_early(const OptimizerFactory& factory,
                                                  const std::vector<Group>& groups) const {
  const auto parameters = parameters_of(groups);
  const auto refuse = [&](const char* reason) {
    if (!options.reduce_in_backward.value_or(false)) return false;
    throw UsageError(fmt::format("{}: option reduce_in_backward {}", prefix(), reason));
  };
  if (options.shard_gradients) return refuse("is part of shard_gradients; expected one of the two");
  if (!options.reduce_in_backward.value_or(group.messages_between_hosts())) return false;
  if (group.size() == 1 || parameters.empty()) return false;
  if (!options.reduce_gradients) return refuse("needs reduce_gradients");
  if (options.reduce_in_place)
    return refuse("keeps the gradients until step(); expected reduce_in_place off");
  if (zero::uses_all_parameters(factory))
    return refuse("needs an optimizer that does not use all parameters at once");
  if (std::any_of(parameters.begin(), parameters.end(),
                  [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); }))
    return refuse(
        "needs parameters on the CPU; expected shard_gradients, which reduces within backward on "
        "any device");
  return true;
}

/// [Note: pages that arrive in the background]
bool ZeroRedundancyOptimizer::Impl::gathers_in_background(const OptimizerFactory& factory,
                                                          const std::vector<Group>& groups) const {
  if (!options.gather_in_background || group.size() == 1) return false;
  const auto parameters = parameters_of(groups);
  const auto refuse = [&](const char* reason) {
    throw UsageError(fmt::format("{}: option gather_in_background {}", prefix(), reason));
  };
  if (!options.parameters_as_bucket_view) refuse("needs parameters_as_bucket_view");
  if (options.wire.parameters != WireFormat::float32)
    refuse("needs parameters that travel unrounded; expected wire.parameters float32");
  if (zero::uses_all_parameters(factory))
    refuse("needs an optimizer that does not use all parameters at once");
  if (std::any_of(parameters.begin(), parameters.end(),
                  [](const auto& parameter) { return !parameter.tensor.device().is_cpu(); }))
    refuse("needs parameters on the CPU");
  return sharding::start_detection_for(kName, group.rank(), "parameters", "gather_in_background");
}

}  // namespace tessera
