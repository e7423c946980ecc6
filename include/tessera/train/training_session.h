#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <torch/nn/module.h>

#include "tessera/data/dataset.h"
#include "tessera/process_group.h"
#include "tessera/train.h"
#include "tessera/train/config.h"

#pragma GCC visibility push(default)
namespace tessera {

/// The result of one step. The same on all ranks that train together.
struct SessionStep {
  int64_t step = 0;      ///< its number, from 0
  int64_t samples = 0;   ///< of all ranks; 0: no rank had any, and nothing happened
  double loss = 0;       ///< mean over these samples, before the update; NaN without any
  double grad_norm = 0;  ///< of the mean gradient, before clipping; NaN without an update
  double lr = 0;         ///< of the first parameter group
  bool updated = false;  ///< false: the step was left out, see train.on_nonfinite
  bool stopped = false;  ///< request_stop() was called on a rank: call finish()
  std::map<std::string, double> figures = {};  ///< "loss", and others that the loss returns
};

/// The trainer without its loop, for programs that have one: a simulation trains while it runs.
/// Wrapper, optimizer, schedule, accumulation, clipping, precision, loss, checkpoints, log and
/// report are those of the config (docs/config.md). The samples are tensors in memory. Their number
/// may differ between ranks, and some ranks may have none. Losses and gradients are means over the
/// samples of all ranks.
///
/// The config has no section `data`, and every key of `train` is optional: without `train.steps`
/// the training has no end. Every function is collective unless marked "Local.", and blocks. An
/// error of one rank is a UsageError with the same text on all. BrokenWorldError when a peer is
/// lost. No signal handler is installed, and
/// nothing is printed on standard output unless train.log_every is set. For one thread at a time.
///
///   const auto config = tessera::parse_config(text);
///   tessera::TrainingSession session(config, tessera::init_process_group());
///   for (...) {
///     const auto done = session.step(inputs, targets);
///     if (done.stopped) break;
///   }
///   session.finish();
class TrainingSession {
 public:
  /// Makes everything, and resumes from the newest checkpoint of `checkpoint.folder`, written by
  /// any number of ranks.
  TrainingSession(Config config, ProcessGroup world);
  /// Local: it does not finish().
  ~TrainingSession();
  TrainingSession(TrainingSession&&) noexcept;
  TrainingSession& operator=(TrainingSession&&) noexcept;

  /// One step with this rank's samples. Dimension 0 of each tensor counts them; a rank without
  /// samples gives tensors with 0 rows, or undefined ones. The tensors are not changed and not
  /// kept. After finish() or after train.steps steps it is a UsageError. With train.accumulation a
  /// rank with samples needs at least that many.
  SessionStep step(const at::Tensor& inputs, const at::Tensor& targets = {});
  SessionStep step(const Batch& batch);

  /// The model's prediction for this rank's inputs, in evaluation mode, without gradients, with the
  /// averaged weights if the config has train.ema. The ranks may have different numbers of rows;
  /// on a rank without rows the result has 0 rows, and shape [0] if no rank has any.
  at::Tensor predict(const at::Tensor& inputs);
  /// The losses and figures of given samples: means over the samples of all ranks, in evaluation
  /// mode, with the averaged weights. "loss" is the total.
  std::map<std::string, double> evaluate(const at::Tensor& inputs, const at::Tensor& targets = {});

  /// Writes a checkpoint, also if the last step has written one. Returns its path. UsageError
  /// without checkpoint.folder. With `checkpoint.every`, step() also writes them.
  std::string save();
  /// The end: the last checkpoint, train.save, the lines of the report. Afterwards only model(),
  /// predict() and evaluate() may be called.
  TrainResult finish();

  /// Gives a whole parameter new values, which are the same on all ranks. `values` has its shape.
  void set_weight(const std::string& name, const at::Tensor& values);

  int64_t steps() const;  ///< Steps done, also those before a resumption. Local.
  /// The module that is trained. With FullyShardedDataParallel its parameters are shards. Local.
  torch::nn::Module& model() const;
  ModelWrapper& wrapper() const;  ///< Local.

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#pragma GCC visibility pop
