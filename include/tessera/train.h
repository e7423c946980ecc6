#pragma once

#include <optional>
#include <vector>

#include "tessera/config.h"
#include "tessera/process_group.h"

namespace tessera {

/// What a run came to. The same on every rank, but for the last.
struct TrainResult {
  std::vector<double> losses;         ///< of each step: mean over the global batch, before the update
  std::vector<double> grad_norms;     ///< of each step: 2-norm of the global mean gradient, before clipping
  std::optional<double> eval_loss;    ///< after the last step, nats per token; none without evaluation data
  std::optional<double> bigram_loss;  ///< rank 0: what a bigram model of the same split reaches
};

/// Trains as `config` says on the ranks of `group`: every rank calls it, with the same config; it blocks until the run
/// is over. Rank 0 prints to standard output and writes the files. Before the first step all ranks agree that all are
/// ready: whatever is wrong on one (missing file, batch that ranks do not divide, unwritable folder, other parameters)
/// is a UsageError with the same text on all. Throws BrokenWorldError when a peer is lost.
TrainResult run_training(const Config& config, ProcessGroup group);

/// The command line `NAME CONFIG.yaml [key=value …]` (argv[0] is the name): reads the config, starts this process's
/// part of the world (init_process_group) and runs. Never throws; returns the exit code: 0, 1 when the run failed (each
/// rank says why on standard error), 2 when config, files or options are wrong (said once, by the first rank of each
/// host).
int train_main(int argc, char** argv);

}  // namespace tessera
