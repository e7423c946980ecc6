#pragma once

#include <cstdint>
#include <functional>
#include <vector>

// Learning rates as pure functions of the training's progress. They have no state, so nothing is
// saved or restored, and all ranks compute the same rates. Each function below that returns a
// schedule checks its options and throws UsageError naming the scheduler and the option. Local.

#pragma GCC visibility push(default)
namespace tessera {

class OptionReader;

/// The progress of training at the beginning of a step.
struct Progress {
  int64_t step = 0;   ///< Completed steps.
  int64_t steps = 0;  ///< Steps of the whole training.
  double epoch = 0;   ///< Completed epochs, including the fraction of the current one.
  double epochs = 0;  ///< Epochs of the whole training.
};

/// Returns the learning rate of the step that begins at `progress`, for a parameter group whose own
/// rate is `base_lr`.
using LrSchedule = std::function<double(const Progress& progress, double base_lr)>;

/// The unit of a schedule. In the formulas below, t is the number of completed steps (`step`) or of
/// completed whole epochs (`epoch`: the rate changes only between epochs, as if PyTorch's
/// scheduler.step() were called once an epoch). T is the total in the same unit.
enum class ScheduleBy { step, epoch };

/// base_lr · (t + 1) / warmup_steps while t < warmup_steps, then base_lr.
struct ConstantLrOptions {
  int64_t warmup_steps = 0;  ///< >= 0, in units of `by`.
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule constant_lr(const ConstantLrOptions& options = {});

/// During the warm-up as constant_lr(). Then min_lr + (base_lr − min_lr) · (1 + cos(π · p)) / 2,
/// with p = (t − warmup_steps) / (decay_steps − warmup_steps). From decay_steps on, min_lr.
struct WarmupCosineLrOptions {
  int64_t warmup_steps = 0;  ///< >= 0, in units of `by`.
  /// In units of `by`, warm-up included; >= warmup_steps. 0: T.
  int64_t decay_steps = 0;
  double min_lr = 0;  ///< >= 0
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule warmup_cosine_lr(const WarmupCosineLrOptions& options = {});

/// base_lr · (start_factor + (end_factor − start_factor) · min(t, total_iters) / total_iters).
/// (PyTorch: LinearLR)
struct LinearLrOptions {
  double start_factor = 1.0 / 3;  ///< In (0, 1].
  double end_factor = 1;          ///< In [0, 1].
  int64_t total_iters = 5;        ///< >= 1
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule linear_lr(const LinearLrOptions& options = {});

/// base_lr · gamma^⌊t / step_size⌋. (PyTorch: StepLR)
struct StepLrOptions {
  int64_t step_size = 0;  ///< >= 1; must be set.
  double gamma = 0.1;     ///< > 0
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule step_lr(const StepLrOptions& options);

/// base_lr · gamma^(number of milestones ≤ t). (PyTorch: MultiStepLR)
struct MultiStepLrOptions {
  std::vector<int64_t> milestones = {};  ///< At least one, ascending, each >= 1.
  double gamma = 0.1;                    ///< > 0
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule multi_step_lr(const MultiStepLrOptions& options);

/// base_lr · gamma^t. (PyTorch: ExponentialLR)
struct ExponentialLrOptions {
  double gamma = 0;  ///< > 0; must be set.
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule exponential_lr(const ExponentialLrOptions& options);

/// base_lr · (1 − min(t, total_iters) / total_iters)^power. (PyTorch: PolynomialLR)
struct PolynomialLrOptions {
  int64_t total_iters = 5;  ///< >= 1
  double power = 1;         ///< > 0
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule polynomial_lr(const PolynomialLrOptions& options = {});

/// eta_min + (base_lr − eta_min) · (1 + cos(π · t / t_max)) / 2. After t_max the rate rises again.
/// (PyTorch: CosineAnnealingLR, whose T_max is t_max here)
struct CosineLrOptions {
  int64_t t_max = 0;   ///< >= 1; must be set.
  double eta_min = 0;  ///< >= 0
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule cosine_lr(const CosineLrOptions& options);

/// Schedules in sequence. At each t the schedule with begin ≤ t < end gives the rate. It computes
/// from the group's own base_lr, as if training were [begin, end): its t starts at 0 and its T is
/// end − begin. For a schedule in the other unit, steps and epochs are converted by Progress's
/// totals. Before the first begin the rate is base_lr. After the end of a schedule, until the next
/// one begins, the rate stays the one that the schedule gives at its end.
struct ChainedLrOptions {
  struct Link {
    LrSchedule schedule = {};
    int64_t begin = 0;  ///< >= the end of the previous link.
    int64_t end = -1;   ///< > begin. -1: T; only for the last link.
  };
  std::vector<Link> schedules = {};  ///< At least one.
  ScheduleBy by = ScheduleBy::step;  ///< The unit of begin and end.
};
LrSchedule chained_lr(const ChainedLrOptions& options);

}  // namespace tessera
#pragma GCC visibility pop
