#pragma once

#include <csignal>

namespace tessera::train {

constexpr int kInterrupt = SIGINT;
constexpr int kTerminate = SIGTERM;

/// The signal that request_stop() was called with; 0: none.
int stop_requested() noexcept;

/// Installs handlers: SIGINT and SIGTERM call request_stop(). A signal more than a second after the
/// first ends the process at once with exit code 128 + its number; committed checkpoints are
/// complete, and one that is being written is ignored later. SIGXFSZ is ignored.
void handle_signals();

}  // namespace tessera::train
