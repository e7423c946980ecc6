#pragma once

#include "train/state/run_context.h"

namespace tessera::train {

/// Builds the model of `own` on the run's device, with the config's loss and the frozen parameters
/// of model.freeze, and then seeds this rank's generators. `layers`: for layers that communicate;
/// then collective, otherwise local. The config must outlive the result.
TrainedModel build_model(const RunContext& context, const ModelSections& own,
                         const ProcessGroup& layers);

/// Before step number `step`: freezes and thaws the parameters of model.freeze that have an
/// `until`. Local.
void freeze_for_step(const ModelSections& own, const torch::nn::Module& module, int64_t step);

}  // namespace tessera::train
