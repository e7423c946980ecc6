#pragma once

#include "train/state/run_context.h"

namespace tessera::train {

/// The model of `own` on the run's device, with the config's loss, frozen as model.freeze says;
/// seeds this rank's generators afterwards. `layers`: for layers that communicate; then collective,
/// otherwise local. The config must outlive the result.
TrainedModel build_model(const RunContext& context, const ModelSections& own,
                         const ProcessGroup& layers);

/// Before step number `step`: freezes and thaws the parameters of model.freeze that have an
/// `until`. Local.
void freeze_for_step(const ModelSections& own, const torch::nn::Module& module, int64_t step);

}  // namespace tessera::train
