#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/data/sampler.h"
#include "tessera/step/early_stop.h"
#include "tessera/step/grad_scaler.h"
#include "train/report/records.h"

namespace tessera::train {

/// An evaluation after `step` steps, with the figure that it is ranked by.
struct RankedStep {
  int64_t step = 0;
  double value = 0;
};

/// The checkpoints of checkpoint.keep_best.
struct KeptSteps {
  std::string metric;
  bool larger = false;            ///< larger values are better
  std::vector<RankedStep> steps;  ///< the best one first
};

/// The state of BestEvaluations.
struct BestState {
  std::optional<EarlyStop::State> early_stop = {};
  std::string stop_metric = {};  ///< of train.early_stop; "": unknown
  bool stop_larger = false;
  std::optional<RankedStep> weights = {};  ///< of train.early_stop
  std::optional<KeptSteps> kept = {};
};

/// One model of a run.
struct SavedModel {
  std::string parallel = {}, optimizer = {};  ///< types
  std::optional<GradScaler::State> loss_scale = {};
  std::vector<std::pair<std::string, std::string>> meaning = {};  ///< ModelPlan::meaning
  std::optional<int64_t> average_updates = {};
};

/// The state.json of a checkpoint. An absent value was not part of the run.
struct SavedState {
  int64_t step = 0;          ///< steps done
  int64_t global_batch = 0;  ///< 0: unknown
  SamplerState data;
  int ranks = 0;
  BestState best = {};
  std::map<std::string, SavedModel> models = {};  ///< by name; that of the only one is ""
  /// The record of the last step, whose evaluation an interruption left undone.
  std::optional<StepRecord> evaluation_due = {};
  nlohmann::ordered_json local_sgd = {};  ///< of TrainingGroups::save(); null: none
  std::set<int64_t> left_out = {};        ///< steps that are not trained
  std::optional<double> best_eval_loss = {};
  std::vector<std::string> hooks = {};
};

std::string to_text(const SavedState& state);
/// Throws UsageError, which begins with `where`, for a text of another form.
SavedState saved_state_of(const std::string& text, const std::string& where);

}  // namespace tessera::train
