#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/train/model_wrapper.h"
#include "train/state/run_context.h"
#include "train/step/fault_policy.h"
#include "train/step/step_buffers.h"
#include "train/step/training_step.h"

namespace tessera::train {

/// Losses, gradients and parameters that are not finite, and losses that jump: finds the origin and
/// carries out the decisions of the FaultPolicy. See docs/train.md. Collective unless marked
/// "Local.".
class Faults {
 public:
  /// `wrapper` must live longer. Local.
  Faults(const RunContext& context, ModelWrapper& wrapper);

  const FaultPolicy& policy() const { return policy_; }
  void begin_step() { buffers_.keep(); }  ///< Local.
  /// After the step number `step`.
  void end_step(int64_t step, const StepInput& input, const StepResult& result);
  /// After `done` steps: parameters and optimizer state in a checkpoint must be finite. `buffers`
  /// may hold infinities that are meant.
  void check_checkpoint(const std::string& path, const std::vector<std::string>& buffers,
                        int64_t done);
  /// After the last step, because no later loss shows the effect of its update.
  void check_parameters(int64_t done);

  bool ended() const { return rollback_ || !failure_.empty(); }  ///< Local.
  const std::string& failure() const { return failure_; }        ///< ends the run with an error
  const std::vector<int>& ranks() const { return ranks_; }       ///< of the origin; empty: unknown
  /// The step to which the run returns, and which it then leaves out.
  const std::optional<int64_t>& rollback() const { return rollback_; }

 private:
  std::string origin_of(Fault fault, int64_t step, const StepInput& input,
                        const StepResult& result);
  std::string origin_of_loss(int64_t step, const StepInput& input, const StepResult& result);
  std::string origin_of_gradient(const StepInput& input, const StepResult& result);
  std::string nonfinite_parameter(ProcessGroup group, int64_t done);
  void warn(const std::string& text) const;
  void roll_back(int64_t step, const std::string& reason);
  void fail(const std::string& reason);
  void fail_in_step(const std::string& reason);
  void end_after_update(const std::string& origin, int64_t done);

  const RunContext& context_;
  ModelWrapper& wrapper_;
  FaultPolicy policy_;
  StepBuffers buffers_;  // with train.on_nonfinite: skip
  std::string failure_;
  std::vector<int> ranks_;
  std::optional<int64_t> rollback_;
};

}  // namespace tessera::train
