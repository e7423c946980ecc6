#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/process_group.h"

// The records of a run as JSON. The log, the hooks and `tessera report` all take these.

namespace tessera::train {

/// One line of the log.
struct StepRecord {
  using Figures = std::vector<std::pair<std::string, double>>;

  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  double ms = 0;
  int64_t samples = 0;  ///< over all ranks
  int64_t tokens = 0;   ///< over all ranks; 0: samples are not token sequences
  double epoch = 0;
  double loss_scale = 1;
  Figures figures;     ///< the model's other figures
  Figures evaluation;  ///< figures of the evaluation after this step; empty: none
};

/// The line of a step. `with_scale`: has the loss scale.
nlohmann::ordered_json json_of(const StepRecord& record, bool with_scale);

/// Calls and payload bytes by kind of collective, and the seconds waited.
nlohmann::ordered_json json_of(const CommStats& communication);

/// The line of an event: "event" and "time" (seconds since 1970) and "step", then the keys of
/// `event`.
std::string event_line(const std::string& name, int64_t step, nlohmann::ordered_json event);

}  // namespace tessera::train
