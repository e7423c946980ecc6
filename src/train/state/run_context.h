#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "tessera/process_group.h"
#include "tessera/train/config.h"
#include "train/groups/training_groups.h"
#include "train/report/reporter.h"
#include "train/watch/heartbeat.h"

namespace tessera::train {

/// The objects that all parts of a run use, on one rank. Local.
struct RunContext {
  const Config& config;
  ProcessGroup group;  ///< all ranks
  Heartbeat& heartbeat;
  at::Device device = at::kCPU;                 ///< of the model
  std::unique_ptr<TrainingGroups> groups = {};  ///< always there after the first checks
  std::unique_ptr<Reporter> reporter = {};      ///< on rank 0

  bool first() const { return group.rank() == 0; }
  /// The ranks that train together in every step.
  const ProcessGroup& own_group() const { return groups->inner(); }
  /// Prints a line on rank 0, also before there is a reporter.
  void say(const std::string& text) const {
    if (reporter) {
      reporter->line(text);
    } else if (config.train.log_every == 0) {
      if (first()) say_without_output(text);
    } else if (first()) {
      std::puts(text.c_str());
      std::fflush(stdout);
    }
  }
};

}  // namespace tessera::train
