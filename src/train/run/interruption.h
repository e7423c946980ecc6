#pragma once

#include <csignal>

namespace tessera::train {

constexpr int kInterrupt = SIGINT;
constexpr int kTerminate = SIGTERM;

/// The signal that request_stop() was called with; 0: none.
int stop_requested() noexcept;

/// SIGINT and SIGTERM ask runs to stop. One that comes more than a second after the first ends the
/// process at once with 128 + its number: what is committed is complete, what is being written does
/// not count. SIGXFSZ is ignored.
void handle_signals();

}  // namespace tessera::train
