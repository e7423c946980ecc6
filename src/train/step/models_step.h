#pragma once

#include "tessera/train/train_step.h"
#include "train/step/training_step.h"

namespace tessera::train {

/// A step of several models; the program's `plan` is the step. `whole`: the wrapper of all of them.
/// The references must live longer. `place`: of the train step in the config, for errors. The
/// figures of each model follow those of the plan; lr, grad_norm and loss_scale are the first
/// model's.
std::unique_ptr<RunStep> make_models_step(const TrainStep& plan, StepModels& models,
                                          ModelWrapper& whole, std::string place);

}  // namespace tessera::train
