#pragma once

#include <cstdint>
#include <functional>
#include <vector>

// Learning rates as pure functions of how far the training is: nothing to save, nothing to restore,
// the same on all ranks. Each maker checks its options and throws UsageError naming scheduler and
// option.

namespace tessera {

class OptionReader;

/// How far the training is when a step begins.
struct Progress {
  int64_t step = 0;   ///< Steps done.
  int64_t steps = 0;  ///< Steps of the whole training.
  double epoch = 0;   ///< Epochs done, with the fraction of the running one.
  double epochs = 0;  ///< Epochs of the whole training.
};

/// The learning rate of the step that begins at `progress`, for a parameter group whose own rate is
/// `base_lr`.
using LrSchedule = std::function<double(const Progress& progress, double base_lr)>;

/// What a schedule counts. In the formulas below t is the steps done (`step`) or the whole epochs
/// done (`epoch`: the rate changes between epochs only, as with PyTorch's scheduler.step() once an
/// epoch), and T the total of the same.
enum class ScheduleBy { step, epoch };

/// base_lr · (t + 1) / warmup_steps while t < warmup_steps, then base_lr.
struct ConstantLrOptions {
  int64_t warmup_steps = 0;  ///< >= 0, in units of `by`
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule constant_lr(const ConstantLrOptions& options = {});

/// As constant_lr during the warm-up; then, with p = (t − warmup_steps) / (decay_steps −
/// warmup_steps), min_lr + (base_lr − min_lr) · (1 + cos(π · p)) / 2; and min_lr from decay_steps
/// on.
struct WarmupCosineLrOptions {
  int64_t warmup_steps = 0;  ///< >= 0, in units of `by`
  int64_t decay_steps = 0;   ///< In units of `by`, warm-up included: >= warmup_steps, or 0: T.
  double min_lr = 0;         ///< >= 0
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
  int64_t step_size = 0;  ///< >= 1; has no default.
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
  double gamma = 0;  ///< > 0; has no default.
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

/// eta_min + (base_lr − eta_min) · (1 + cos(π · t / t_max)) / 2; past t_max it rises again.
/// (PyTorch: CosineAnnealingLR, whose T_max is t_max here)
struct CosineLrOptions {
  int64_t t_max = 0;   ///< >= 1; has no default.
  double eta_min = 0;  ///< >= 0
  ScheduleBy by = ScheduleBy::step;
  void read(OptionReader& options);
};
LrSchedule cosine_lr(const CosineLrOptions& options);

/// Schedules in sequence. At each moment t the one with begin ≤ t < end gives the rate, from the
/// group's own base_lr and as if the training were [begin, end): its t starts from 0, its T is end
/// − begin. (What another one counts in the other unit is converted by Progress's totals.) Before
/// the first begin the rate is base_lr; where none covers t, after an end, it stays what the
/// schedule that ended gives at its end.
struct ChainedLrOptions {
  struct Link {
    LrSchedule schedule = {};
    int64_t begin = 0;  ///< >= the end of the one before.
    int64_t end = -1;   ///< > begin, or -1, for the last one only: T.
  };
  std::vector<Link> schedules = {};  ///< At least one.
  ScheduleBy by = ScheduleBy::step;  ///< Units of begin and end.
};
LrSchedule chained_lr(const ChainedLrOptions& options);

}  // namespace tessera
