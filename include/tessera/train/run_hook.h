#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera {

class ModelWrapper;
struct Evaluated;

/// One batch of an evaluation on one rank, with the prediction for it.
struct EvaluatedBatch {
  int64_t first_sample = 0;  ///< its number in the dataset; the others follow
  const Evaluated& batch;    ///< tessera/train/model_wrapper.h
  bool test = false;         ///< of the test at the end of the run
};

/// The state of a run, as hooks see it.
struct RunState {
  int64_t step = 0;   ///< steps done
  int64_t steps = 0;  ///< of the whole run
  double epoch = 0;
  double loss = 0;  ///< of the last step, the same on all ranks
  double grad_norm = 0;
  double lr = 0;
  /// Named figures of the last step or evaluation, as means over the ranks.
  std::vector<std::pair<std::string, double>> figures;
  ModelWrapper* model = nullptr;  ///< of several models, all as one
  /// By name. The only model of a run has the name "".
  std::map<std::string, ModelWrapper*> models = {};
  bool stop = false;  ///< set to true on all ranks to end the run after this step
};

/// Code that a program adds to a run without changing the training loop. All ranks have the same
/// hooks and call them at the same points, in the order of the config, so hooks may communicate.
class RunHook {
 public:
  virtual ~RunHook() = default;
  virtual void before_run(RunState&) {}
  virtual void after_step(RunState&) {}
  virtual void after_evaluation(RunState&) {}  ///< `figures`: of the evaluation
  virtual void after_test(RunState&) {}        ///< `figures`: of the test
  virtual void after_run(RunState&) {}
  /// True if evaluations compute predictions for this hook even if the config has no metrics.
  virtual bool wants_predictions() const { return false; }
  /// Each batch of an evaluation or of the test, if predictions are computed: before
  /// after_evaluation() or after_test(), on the rank that evaluates it, each sample on one rank.
  /// With parallel.local_sgd in group 0 alone. Must not communicate: ranks may have unequal numbers
  /// of batches.
  virtual void on_predictions(const EvaluatedBatch&) {}
  /// A record of the run, as one line of JSON without its end: of a step, as in `train.log`, or of
  /// an event, as in the file of events beside it (docs/report.md has the keys of both). Called on
  /// rank 0 only, so it must not communicate, and also if `train.log` names no file. A second
  /// record of the same step replaces the first.
  virtual void on_record(const std::string& /*json*/) {}
  /// The hook's state for a checkpoint, as text of any form. Rank 0's text is saved and passed to
  /// load_state() on all ranks.
  virtual std::string state() const { return ""; }
  virtual void load_state(const std::string& /*text*/) {}
};

}  // namespace tessera
#pragma GCC visibility pop
