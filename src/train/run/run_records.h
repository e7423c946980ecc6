#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/checkpoint_store.h"
#include "tessera/train/model_wrapper.h"
#include "train/run/run_data.h"
#include "train/run/run_models.h"
#include "train/state/run_weights.h"

// The lines and events of a run on rank 0. See docs/report.md. Local, unless stated otherwise; on
// other ranks nothing happens.

namespace tessera::train {

/// `resumed`: the checkpoint from which the run resumes, or null.
void report_start(const RunContext& context, const RunData& data, const RunWeights& weights,
                  const Checkpoint* resumed, int64_t done);
/// The memory of each model after the first step: rank 0's bytes for all ranks.
void record_memory(const RunContext& context, const RunModels& models, int64_t done);
/// Prints and records the memory of all ranks, model by model. Collective within own_group().
void report_memory(const RunContext& context, const RunModels& models, int64_t done);
void record_end(const RunContext& context, const RunData& data, const std::string& outcome,
                int64_t first_step, int64_t done);

/// A warning if the file system of `folder` has fewer than `bytes` bytes free for this user; ""
/// otherwise and where that is unknown. `what` names the files that need them. Quotas and
/// compression are not visible here, so this is no reason to end a run.
std::string space_warning(const std::string& folder, int64_t bytes, const std::string& what);
/// Prints the warning for the folder of checkpoints and, `with_save`, for the folder of train.save.
void warn_of_space(const RunContext& context, int64_t bytes, const std::string& what,
                   bool with_save);
/// Prints the text of train.sample. Collective.
void print_sample(const RunContext& context, ModelWrapper& wrapper);

}  // namespace tessera::train
