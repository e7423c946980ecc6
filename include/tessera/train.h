#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/process_group.h"
#include "tessera/train/config.h"

#pragma GCC visibility push(default)
namespace tessera {

/// The result of a run. The same on every rank, except `baseline_loss`. With parallel.local_sgd the
/// figures of steps are those of the rank's group.
struct TrainResult {
  int64_t first_step = 0;      ///< steps done before this run: 0, or the checkpoint's
  std::vector<double> losses;  ///< per step: mean over the global batch, before the update
  /// Per step: the norm of the global mean gradient (train.clip_norm_type), before clipping.
  std::vector<double> grad_norms;
  std::optional<double> eval_loss;  ///< after the last step; no value without evaluation data
  /// All figures of the last evaluation: "loss", "accuracy", …
  std::map<std::string, double> eval_figures;
  std::optional<double> best_eval_loss;
  std::optional<double> baseline_loss;  ///< rank 0: loss of a trivial model on the same data
  /// Steps without an update: skipped by loss scaling or by train.on_nonfinite.
  int64_t skipped_steps = 0;
  int64_t rollbacks = 0;   ///< see train.on_nonfinite
  int interrupted_by = 0;  ///< the signal that ended the run; 0: it ran to its end
  std::string checkpoint;  ///< the last checkpoint written; empty: none
};

/// Runs the training of `config` on the ranks of `group`. Collective: every rank calls it with the
/// same config; it blocks until the run is over. Rank 0 prints to standard output and writes the
/// files. Before the first step all ranks check that all of them are ready: an error on one rank
/// (missing file, batch that the ranks do not divide, unwritable folder, different parameters) is a
/// UsageError with the same text on all ranks. Throws BrokenWorldError when a peer is lost.
TrainResult run_training(const Config& config, ProcessGroup group);

/// Makes the runs of this process save a checkpoint and end after the current step. A request on
/// one rank ends the run on all ranks. train_main's signal handler calls it. Async-signal-safe.
void request_stop(int signal) noexcept;

/// The command line of `tessera train`, for the main() of a program with components of its own:
/// `NAME [-n RANKS] CONFIG.yaml [key=value …] [--dump-config full|minimal] [--no-resume]
/// [--config-reference]`. Reads the config, joins the world (init_process_group) and trains. With
/// -n it starts RANKS copies of itself on this host instead. SIGTERM, SIGINT, SIGHUP, SIGQUIT,
/// SIGUSR1 and SIGUSR2 save a checkpoint, if checkpoint.folder is set, and end the run; a second
/// signal, more than a second after the first, ends the process at once (SIGUSR1 and SIGUSR2, which
/// batch systems send ahead of the end, do not count as the first). Never throws. Returns the exit
/// code: 0; 1 when the run failed (each rank prints the reason on standard error); 2 when the
/// config, a file or an argument is wrong (printed once, by the first rank of each host); 128 + the
/// signal that ended the run. With train.watchdog a rank without progress ends the process with
/// exit code 3.
int train_main(int argc, char** argv);

}  // namespace tessera
#pragma GCC visibility pop
