#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

class ModelWrapper;

/// How a run stands.
struct RunState {
  int64_t step = 0;   ///< steps done
  int64_t steps = 0;  ///< of the whole run
  double epoch = 0;
  double loss = 0;  ///< of the last step, the same on all ranks
  double grad_norm = 0;
  double lr = 0;
  std::vector<std::pair<std::string, double>>
      figures;  ///< of the last step or evaluation, means over ranks
  ModelWrapper* model = nullptr;
  bool stop = false;  ///< set it, on all ranks alike, to end the run after this step
};

/// What a program adds to a run without touching the loop. All ranks have the same hooks and call
/// them at the same points, in the order of the config, so hooks may communicate.
class RunHook {
 public:
  virtual ~RunHook() = default;
  virtual void before_run(RunState&) {}
  virtual void after_step(RunState&) {}
  virtual void after_evaluation(RunState&) {}  ///< figures: of the evaluation
  virtual void after_run(RunState&) {}
  /// Into a checkpoint and back; text of any kind. Rank 0's is kept, and given to all.
  virtual std::string state() const { return ""; }
  virtual void load_state(const std::string& /*text*/) {}
};

}  // namespace tessera
