#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

class ModelWrapper;

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
  ModelWrapper* model = nullptr;
  bool stop = false;  ///< set to true on all ranks to end the run after this step
};

/// Code that a program adds to a run without changing the training loop. All ranks have the same
/// hooks and call them at the same points, in the order of the config, so hooks may communicate.
class RunHook {
 public:
  virtual ~RunHook() = default;
  virtual void before_run(RunState&) {}
  virtual void after_step(RunState&) {}
  virtual void after_evaluation(RunState&) {}  ///< `figures`: those of the evaluation
  virtual void after_run(RunState&) {}
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
