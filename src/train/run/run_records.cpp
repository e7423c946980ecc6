#include "tessera/version.h"
#include "train/config/config_sections.h"
#include "train/run/run.h"

// The events of a run, on rank 0. See docs/report.md.

namespace tessera::train {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const MemoryUse& use) {
  return {{"parameters", use.parameters},
          {"gradients", use.gradients},
          {"optimizer_state", use.optimizer_state}};
}

}  // namespace

void Run::record_start() {
  if (!reporter_) return;
  Json options = Json::object();
  if (config_.options) {
    for (const auto& option : *config_.options) {
      const std::string key = dotted(option.path);
      options[key] = config_.value(key);
    }
  }
  int64_t parameter_bytes = 0;
  for (size_t i = 0; i < parameter_count_; ++i) {
    parameter_bytes += static_cast<int64_t>(c10::elementSize(weights_[i].dtype)) *
                       c10::multiply_integers(weights_[i].shape);
  }
  reporter_->event("start", done_,
                   {{"steps", iterations()},
                    {"ranks", group_.size()},
                    {"backend", group_.backend_name()},
                    {"model", config_.model.type},
                    {"parallel", config_.parallel.type},
                    {"optimizer", config_.optimizer.type},
                    {"global_batch", config_.train.global_batch},
                    {"parameters", parameters_},
                    {"parameter_bytes", parameter_bytes},
                    {"resumed_from", resumed_ ? Json(resumed_->path()) : Json()},
                    {"version", TESSERA_VERSION},
                    {"config", options}});
}

/// `ranks`: the memory of each rank.
void Run::record_memory(const std::vector<MemoryUse>& ranks) {
  const MemoryUse whole = wrapper_->unsharded(ranks);
  Json rows = Json::array();
  for (const auto& use : ranks) rows.push_back(json_of(use));
  reporter_->event("memory", done_,
                   {{"ranks", rows},
                    {"formula", json_of(wrapper_->formula(whole))},
                    {"unsharded", json_of(whole)}});
}

void Run::record_end(const std::string& outcome) {
  if (!reporter_) return;
  reporter_->event("end", done_,
                   {{"outcome", outcome},
                    {"steps_here", done_ - result_.first_step},
                    {"waited_for_data", loader_ ? loader_->waited() : 0},
                    {"communication", train::json_of(groups_->stats())}});
}

}  // namespace tessera::train
