#pragma once

#include <chrono>
#include <string>

#include "launch/supervise/supervisor.h"

namespace tessera::launch {

/// Attempt `number` of the options of `around`, on this host: makes its folder, and runs the ranks
/// until the last one has ended.
Outcome run_attempt(const Surroundings& around, int number, const std::string& run_id);

/// Takes the signals that have arrived between two attempts. Returns the one
/// that requests an end, or 0.
int end_requested(SignalWatch& signals);

/// Runs the rounds of several hosts that meet, see hosts_meet(). Returns the launcher's exit code.
int run_rounds(const Surroundings& around);

}  // namespace tessera::launch
