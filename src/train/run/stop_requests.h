#pragma once

#include <array>
#include <csignal>
#include <vector>

namespace tessera::train {

/// The signals that save and end a run. If ranks got different signals, the first in this order
/// determines the exit code.
constexpr std::array<int, 6> kStopSignals{SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

/// The signal that request_stop() was called with; 0: none.
int stop_requested() noexcept;

/// Installs handlers: the signals of kStopSignals call request_stop(), SIGHUP unless it is ignored,
/// as under nohup. A signal more than a second after the first ends the process at once with exit
/// code 128 + its number; committed checkpoints are complete, and one that is being written is
/// ignored later. SIGUSR1 and SIGUSR2 only announce the end, as batch systems do, and are not
/// counted as the first.
void handle_signals();

/// Decides whether a run ends early, and keeps the reason; the same on all ranks. Local.
class StopRequests {
 public:
  /// For each of kStopSignals, whether this rank got it.
  std::vector<double> flags() const;
  /// `ranks`: the sums of flags() over all ranks.
  void note(const std::vector<double>& ranks);
  void stop() { stop_ = true; }

  bool stopped() const { return stop_; }
  int signal() const { return signal_; }  ///< that interrupted the run; 0: none
  bool here() const { return here_; }     ///< whether this rank got a signal

 private:
  bool stop_ = false, here_ = false;
  int signal_ = 0;
};

}  // namespace tessera::train
