#include "tessera/train/registries.h"

#include "train/builtins/builtin_components.h"

namespace tessera::registry {
namespace {

/// The process-wide registry of one kind; `add` adds the library's components at the first use.
template <class Kind>
Kind& filled(const char* kind, void (*add)(Kind&)) {
  static auto& registry = *[&] {
    auto* const fresh = new Kind{kind};
    add(*fresh);
    return fresh;
  }();
  return registry;
}

}  // namespace

Models& models() { return filled<Models>("model", train::add_models); }
Datasets& datasets() { return filled<Datasets>("dataset", train::add_datasets); }
LossFunctions& losses() { return filled<LossFunctions>("loss", train::add_losses); }
Registry<Preprocessor>& preprocessors() {
  return filled<Registry<Preprocessor>>("preprocessor", train::add_preprocessors);
}
Registry<LrSchedule>& schedulers() {
  return filled<Registry<LrSchedule>>("scheduler", train::add_schedulers);
}
Registry<WrapperPlan>& parallel() {
  return filled<Registry<WrapperPlan>>("parallel wrapper", train::add_wrappers);
}
Registry<CommHookPlan>& comm_hooks() {
  return filled<Registry<CommHookPlan>>("communication hook", train::add_comm_hooks);
}

Registry<Metric>& metrics() { return filled<Registry<Metric>>("metric", train::add_metrics); }

TrainSteps& train_steps() {
  return filled<TrainSteps>("train step", [](TrainSteps&) {});  // each is a program's own
}

OptimizerRegistry& optimizers() {
  static auto& registry = *new OptimizerRegistry(default_optimizers());
  return registry;
}

WrapPolicyRegistry& wrap_policies() {
  static auto& registry = *new WrapPolicyRegistry(default_wrap_policies());
  return registry;
}

Registry<std::function<std::shared_ptr<RunHook>()>>& hooks() {
  return filled<Registry<std::function<std::shared_ptr<RunHook>()>>>("hook", train::add_hooks);
}

}  // namespace tessera::registry
