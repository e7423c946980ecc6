#pragma once

#include <string>
#include <vector>

#include "report/run_log.h"

// The parts of the page, as HTML. Each is empty where no run has its records.

namespace tessera::report {

std::string overview(const std::vector<RunLog>& runs);
std::string charts(const std::vector<RunLog>& runs);
/// Steps over time, with restarts and checkpoints.
std::string time_line(const std::vector<RunLog>& runs);
std::string memory(const std::vector<RunLog>& runs);
std::string communication(const std::vector<RunLog>& runs);
/// The options in which runs differ, and all options of each run.
std::string configs(const std::vector<RunLog>& runs);

}  // namespace tessera::report
