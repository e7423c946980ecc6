#pragma once

#include "tessera/train/registries.h"

// Each function adds the library's own components of one kind to a registry. Called once, when the
// registry is first used (registries.cpp).

namespace tessera::train {

void add_models(registry::Models& models);
void add_datasets(registry::Datasets& datasets);
void add_losses(registry::LossFunctions& losses);
void add_preprocessors(Registry<Preprocessor>& preprocessors);
void add_schedulers(Registry<LrSchedule>& schedulers);
void add_metrics(Registry<Metric>& metrics);
void add_comm_hooks(Registry<CommHookPlan>& hooks);
void add_hooks(Registry<std::function<std::shared_ptr<RunHook>()>>& hooks);
void add_wrappers(Registry<WrapperPlan>& wrappers);

}  // namespace tessera::train
