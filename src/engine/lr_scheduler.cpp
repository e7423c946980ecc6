#include "tessera/step/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/option_check.h"
#include "engine/schedule_clock.h"

namespace tessera {

namespace {

/// From `from` (p = 0) to `to` (p = 1) along half a cosine.
double cosine_between(double from, double to, double p) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * p)) / 2;
}

}  // namespace

LrSchedule constant_lr(const ConstantLrOptions& options) {
  engine::check_at_least("scheduler constant", "warmup_steps", options.warmup_steps, 0);
  return [options](const Progress& progress, double base_lr) {
    const double t = engine::moment(progress, options.by);
    const auto warmup = static_cast<double>(options.warmup_steps);
    return t < warmup ? base_lr * (t + 1) / warmup : base_lr;
  };
}

LrSchedule warmup_cosine_lr(const WarmupCosineLrOptions& options) {
  const char* const name = "scheduler warmup_cosine";
  engine::check_at_least(name, "warmup_steps", options.warmup_steps, 0);
  engine::check_at_least(name, "decay_steps", options.decay_steps, 0);
  engine::check_not_negative(name, "min_lr", options.min_lr);
  if (options.decay_steps > 0) {
    engine::check_option(name, "decay_steps", options.decay_steps,
                         options.decay_steps >= options.warmup_steps,
                         "at least warmup_steps = " + std::to_string(options.warmup_steps));
  }
  return [options, rising = constant_lr({options.warmup_steps, options.by})](
             const Progress& progress, double base_lr) {
    const double t = engine::moment(progress, options.by);
    const auto warmup = static_cast<double>(options.warmup_steps);
    if (t < warmup) {
      return rising(progress, base_lr);
    }
    const double end = options.decay_steps > 0 ? static_cast<double>(options.decay_steps)
                                               : engine::total(progress, options.by);
    return t >= end ? options.min_lr
                    : cosine_between(base_lr, options.min_lr, (t - warmup) / (end - warmup));
  };
}

LrSchedule linear_lr(const LinearLrOptions& options) {
  const char* const name = "scheduler linear";
  engine::check_option(name, "start_factor", options.start_factor,
                       options.start_factor > 0 && options.start_factor <= 1, "a number in (0, 1]");
  engine::check_option(name, "end_factor", options.end_factor,
                       options.end_factor >= 0 && options.end_factor <= 1, "a number in [0, 1]");
  engine::check_at_least(name, "total_iters", options.total_iters, 1);
  return [options](const Progress& progress, double base_lr) {
    const auto last = static_cast<double>(options.total_iters);
    const double done = std::min(engine::moment(progress, options.by), last) / last;
    return base_lr * (options.start_factor + (options.end_factor - options.start_factor) * done);
  };
}

LrSchedule step_lr(const StepLrOptions& options) {
  engine::check_at_least("scheduler step", "step_size", options.step_size, 1);
  engine::check_positive("scheduler step", "gamma", options.gamma);
  return [options](const Progress& progress, double base_lr) {
    const double drops =
        std::floor(engine::moment(progress, options.by) / static_cast<double>(options.step_size));
    return base_lr * std::pow(options.gamma, drops);
  };
}

LrSchedule multi_step_lr(const MultiStepLrOptions& options) {
  const char* const name = "scheduler multi_step";
  const auto& milestones = options.milestones;
  engine::check_positive(name, "gamma", options.gamma);
  const bool ascending = std::adjacent_find(milestones.begin(), milestones.end(),
                                            std::greater_equal<>()) == milestones.end();
  engine::check_option(name, "milestones",
                       std::vector<double>(milestones.begin(), milestones.end()),
                       !milestones.empty() && milestones.front() >= 1 && ascending,
                       "at least one integer, each >= 1, in ascending order");
  return [options](const Progress& progress, double base_lr) {
    const auto t = static_cast<int64_t>(engine::moment(progress, options.by));
    const auto passed = std::upper_bound(options.milestones.begin(), options.milestones.end(), t);
    return base_lr *
           std::pow(options.gamma, static_cast<double>(passed - options.milestones.begin()));
  };
}

LrSchedule exponential_lr(const ExponentialLrOptions& options) {
  engine::check_positive("scheduler exponential", "gamma", options.gamma);
  return [options](const Progress& progress, double base_lr) {
    return base_lr * std::pow(options.gamma, engine::moment(progress, options.by));
  };
}

LrSchedule polynomial_lr(const PolynomialLrOptions& options) {
  engine::check_at_least("scheduler polynomial", "total_iters", options.total_iters, 1);
  engine::check_positive("scheduler polynomial", "power", options.power);
  return [options](const Progress& progress, double base_lr) {
    const auto last = static_cast<double>(options.total_iters);
    return base_lr *
           std::pow(1 - std::min(engine::moment(progress, options.by), last) / last, options.power);
  };
}

LrSchedule cosine_lr(const CosineLrOptions& options) {
  engine::check_at_least("scheduler cosine", "t_max", options.t_max, 1);
  engine::check_not_negative("scheduler cosine", "eta_min", options.eta_min);
  return [options](const Progress& progress, double base_lr) {
    const double p = engine::moment(progress, options.by) / static_cast<double>(options.t_max);
    return cosine_between(base_lr, options.eta_min, p);
  };
}

}  // namespace tessera
