#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/process_group.h"
#include "tessera/train/config.h"

namespace tessera {

/// What a run came to. The same on every rank, but for `baseline_loss`.
struct TrainResult {
  int64_t first_step = 0;      ///< steps that were done before: 0, or where a checkpoint was
  std::vector<double> losses;  ///< of each step: mean over the global batch, before the update
  std::vector<double>
      grad_norms;  ///< of each step: 2-norm of the global mean gradient, before clipping
  std::optional<double> eval_loss;  ///< after the last step; none without evaluation data
  std::map<std::string, double>
      eval_figures;  ///< all of the last evaluation: "loss", "accuracy", …
  std::optional<double> best_eval_loss;
  std::optional<double> baseline_loss;  ///< rank 0: what a trivial model of the same data reaches
  int64_t skipped_steps = 0;            ///< by an infinity under loss scaling
  int interrupted_by = 0;               ///< the signal that ended the run; 0: it ran to its end
  std::string checkpoint;               ///< the last one written; empty: none
};

/// Trains as `config` says on the ranks of `group`: every rank calls it, with the same config; it
/// blocks until the run is over. Rank 0 prints to standard output and writes the files. Before the
/// first step all ranks agree that all are ready: whatever is wrong on one (missing file, batch
/// that ranks do not divide, unwritable folder, other parameters) is a UsageError with the same
/// text on all. Throws BrokenWorldError when a peer is lost.
TrainResult run_training(const Config& config, ProcessGroup group);

/// Asks runs of this process to save and end after the running step; what train_main's signal
/// handler calls. Async-signal-safe. One rank that is asked ends the run on all.
void request_stop(int signal) noexcept;

/// The command line of `tessera train`, for a program's own main(): `NAME [-n RANKS] CONFIG.yaml
/// [key=value …]
/// [--dump-config full|minimal] [--no-resume] [--config-reference]`. Reads the config, starts this
/// process's part of the world (init_process_group) and runs; with -n it starts RANKS copies of
/// itself on this host. SIGTERM and SIGINT save a checkpoint, where there is a folder for it, and
/// end the run; one that comes more than a second after the first ends the process at once. Never
/// throws; returns the exit code: 0, 1 when the run failed (each rank says why on standard error),
/// 2 when config, files or options are wrong (said once, by the first rank of each host), 130 or
/// 143 when it was ended by SIGINT or SIGTERM.
int train_main(int argc, char** argv);

}  // namespace tessera
