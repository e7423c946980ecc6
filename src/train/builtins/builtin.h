#pragma once

#include "tessera/error.h"
#include "tessera/train/registries.h"

// What each registry has from the start. One function a kind, called once, when the registry is
// first asked for.

namespace tessera::train {

void add_models(registry::Models& models);
void add_datasets(registry::Datasets& datasets);
void add_losses(registry::LossFunctions& losses);
void add_preprocessors(Registry<Preprocessor>& preprocessors);
void add_schedulers(Registry<LrSchedule>& schedulers);
void add_comm_hooks(Registry<CommHookPlan>& hooks);

WrapperPlan read_unsharded(OptionReader& options);
WrapperPlan read_ddp(OptionReader& options);
WrapperPlan read_zero(OptionReader& options);
WrapperPlan read_distributed(OptionReader& options);
WrapperPlan read_fsdp(OptionReader& options);

/// `key: name` or `key: {type: name, …}`, by `registry`; `name` holds the default; empty: none,
/// and an empty Plan.
template <class Plan, class... Context>
Plan read_component(const Registry<Plan, Context...>& registry, OptionReader& options,
                    const std::string& key, std::string name, const std::string& doc,
                    Context... context) {
  if (options.describing() || !options.given(key) ||
      options.node()->find(key)->kind == ConfigNode::Kind::Map) {
    OptionReader inner = options.map(key);
    if (inner.node() != nullptr) {
      inner.require("type", doc);
    }
    inner.read_choice("type", name, registry.names(), doc);
    if (options.describing() || name.empty()) {
      inner.finish();
      return Plan{};
    }
    return registry.read(name, inner, context...);
  }
  options.read_choice(key, name, registry.names(), doc);
  OptionReader none(nullptr, {key}, options.where());
  return registry.read(name, none, context...);
}

}  // namespace tessera::train
