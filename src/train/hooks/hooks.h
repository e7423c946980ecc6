#pragma once

#include <memory>
#include <string>

#include "tessera/config/option_reader.h"
#include "tessera/train/run_hook.h"

namespace tessera::train {

struct CsvHookOptions {
  std::string path;  ///< the file; its folder must exist
  void read(OptionReader& options);
};

/// Writes the records of steps as a table: a header, then a row a step. A resumed run removes the
/// rows of the steps that it repeats. Columns that appear later, such as eval_loss, are added at
/// the right; earlier rows then have empty fields there. Numbers that are not finite are empty
/// fields.
std::shared_ptr<RunHook> csv_hook(const CsvHookOptions& options);

struct TensorBoardHookOptions {
  std::string folder;
  int64_t histograms_every = 0;  ///< steps; 0: none
  void read(OptionReader& options);
};

/// Writes TensorBoard's event files: every figure of every step ("train/loss", "eval/loss"), and
/// histograms of the parameters ("parameters/NAME"). Each start of a run writes a file of its own.
std::shared_ptr<RunHook> tensorboard_hook(const TensorBoardHookOptions& options);

struct PredictionsHookOptions {
  std::string path;
  bool test = false;  ///< of the test at the end of the run, not of evaluations
  void read(OptionReader& options);
};

/// Writes the predictions of evaluations to a file, from rank 0. Until the write every rank holds
/// the predictions of its samples, and rank 0 holds all.
std::shared_ptr<RunHook> predictions_hook(const PredictionsHookOptions& options);

}  // namespace tessera::train
