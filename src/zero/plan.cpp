#include "zero/plan.h"

#include <algorithm>

#include <fmt/format.h>
#include <torch/optim/lbfgs.h>

#include "comm/group/process_group_impl.h"
#include "sharding/wrapped_parameters.h"
#include "tessera/error.h"

namespace tessera::zero {
namespace {

struct Rule {
  std::string option;  ///< As given, with its value where that is not a switch.
  bool given;
  bool met;  ///< The requirement of the option is met.
  const char* reason;
};

std::string value_of(const char* option, WireFormat format) {
  return fmt::format("{} is {}, and", option, to_string(format));
}

/// The part of the plan that follows from option overlap.
void choose_overlap(Plan& plan, const Setting& setting) {
  const auto& options = plan.options;
  const bool one_by_one = !setting.uses_all_parameters;
  const bool in_background = options.overlap == Overlap::background;
  const bool may_overlap =
      setting.ranks > 1 && one_by_one && setting.on_cpu && options.overlap != Overlap::none;
  // The program may change gradients while an early sum is on its way; the sum is then dropped. The
  // check would take it for wrong.
  plan.early = may_overlap && (in_background || setting.messages_between_hosts) &&
               options.reduce_gradients && !options.shard_gradients && !setting.checks_results;
  const Rule waits[] = {
      {"", in_background, one_by_one, "the optimizer uses all parameters at once"},
      {"", in_background, setting.on_cpu, "parameters are not on the CPU"},
      {"", in_background, options.parameters_as_bucket_view, "parameters_as_bucket_view is off"},
      {"", in_background, !options.share_parameters,
       "share_parameters leaves no copy to compute with meanwhile"},
      {"", in_background, options.wire.parameters == WireFormat::float32,
       "wire.parameters needs all changes at once"},
  };
  const auto reason = std::find_if(std::begin(waits), std::end(waits),
                                   [](const Rule& rule) { return rule.given && !rule.met; });
  plan.in_background = in_background && setting.ranks > 1 && reason == std::end(waits);
  if (setting.ranks > 1 && reason != std::end(waits)) {
    plan.notes.push_back(
        fmt::format("step() gathers the parameters before it returns: {}", reason->reason));
  }
}

}  // namespace

std::unique_ptr<torch::optim::Optimizer> example_of(const OptimizerFactory& factory) {
  return factory({torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{at::zeros({1})})});
}

bool uses_all_parameters(const OptimizerFactory& factory) {
  return dynamic_cast<torch::optim::LBFGS*>(example_of(factory).get()) != nullptr;
}

bool is_reduced_by_ddp(const std::vector<sharding::NamedTensor>& parameters) {
  return sharding::WrappedParameters::reducer_of(parameters) == "DistributedDataParallel";
}

Setting setting_of(const ProcessGroup& group, const OptimizerFactory& factory,
                   const std::vector<sharding::NamedTensor>& parameters) {
  const bool on_cpu = std::all_of(parameters.begin(), parameters.end(), [](const auto& parameter) {
    return !parameter.tensor.defined() || parameter.tensor.device().is_cpu();
  });
  return {group.size(),
          group.messages_between_hosts(),
          on_cpu,
          is_reduced_by_ddp(parameters),
          uses_all_parameters(factory),
          group.impl()->world.options.check_results};
}

Plan plan_zero(const ZeroRedundancyOptimizerOptions& options, const Setting& setting,
               const std::string& prefix) {
  Plan plan{options, false, false, false, {}};
  auto& chosen = plan.options;
  if (options.reduce_gradients && setting.ddp_reduces) {
    chosen.reduce_gradients = false;
    plan.notes.push_back(
        "DistributedDataParallel reduces the gradients, so reduce_gradients is off here");
  }
  const bool one_by_one = !setting.uses_all_parameters;
  const bool rounds_gradients = options.wire.gradients != WireFormat::float32;
  const bool rounds_parameters = options.wire.parameters != WireFormat::float32;
  const Rule needs[] = {
      {fmt::format("bucket_cap_mb is {};", options.bucket_cap_mb), !(options.bucket_cap_mb > 0),
       false, "expected a positive number of MiB"},
      {"shard_gradients", options.shard_gradients, !setting.ddp_reduces,
       "excludes DistributedDataParallel, which reduces the same gradients; expected one of the "
       "two"},
      {"shard_gradients", options.shard_gradients, options.reduce_gradients,
       "needs reduce_gradients; expected it on"},
      {"shard_gradients", options.shard_gradients, one_by_one,
       "needs an optimizer that does not use all parameters at once"},
      {"share_parameters", options.share_parameters, options.parameters_as_bucket_view,
       "needs parameters_as_bucket_view"},
      {"share_parameters", options.share_parameters, one_by_one,
       "needs an optimizer that does not use all parameters at once"},
      {"share_parameters", options.share_parameters, setting.on_cpu, "needs parameters on the CPU"},
      {value_of("wire.gradients", options.wire.gradients), rounds_gradients,
       chosen.reduce_gradients, "the gradients are reduced elsewhere; expected the option there"},
      {value_of("wire.parameters", options.wire.parameters), rounds_parameters,
       options.parameters_as_bucket_view, "it needs parameters_as_bucket_view"},
  };
  for (const auto& rule : needs)
    if (rule.given && !rule.met)
      throw UsageError(fmt::format("{}: option {} {}", prefix, rule.option, rule.reason));
  if (rounds_parameters && !one_by_one) {
    chosen.wire.parameters = WireFormat::float32;
    plan.notes.push_back(
        "this optimizer evaluates the loss within an update, so parameters travel as float32");
  }

  choose_overlap(plan, setting);
  plan.detects = options.shard_gradients || (options.share_parameters && setting.ranks > 1);
  return plan;
}

}  // namespace tessera::zero
