#include "tessera/step/lr_scheduler.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/schedule_clock.h"
#include "tessera/config/option_reader.h"

namespace tessera {

namespace {

/// From `from` (p = 0) to `to` (p = 1) along half a cosine.
double cosine_between(double from, double to, double p) {
  return to + (from - to) * (1 + std::cos(std::numbers::pi * p)) / 2;
}

void read_by(OptionReader& options, ScheduleBy& by) {
  options.read_enum("by", by, {{"step", ScheduleBy::step}, {"epoch", ScheduleBy::epoch}},
                    "the unit that the schedule counts in");
}

}  // namespace

void ConstantLrOptions::read(OptionReader& options) {
  options.read("warmup_steps", warmup_steps,
               "length of the warm-up: step s of it has lr · (s + 1) / warmup_steps", kNotNegative);
  read_by(options, by);
}

LrSchedule constant_lr(const ConstantLrOptions& options) {
  check_options("scheduler constant", options);
  return [options](const Progress& progress, double base_lr) {
    const double t = engine::moment(progress, options.by);
    const auto warmup = static_cast<double>(options.warmup_steps);
    return t < warmup ? base_lr * (t + 1) / warmup : base_lr;
  };
}

void WarmupCosineLrOptions::read(OptionReader& options) {
  options.read("warmup_steps", warmup_steps,
               "length of the warm-up: step s of it has lr · (s + 1) / warmup_steps", kNotNegative);
  options.read("decay_steps", decay_steps, "where the cosine ends; 0: at the end of the run",
               kNotNegative);
  options.read("min_lr", min_lr, "learning rate at the end of the cosine", kNotNegative);
  read_by(options, by);
}

LrSchedule warmup_cosine_lr(const WarmupCosineLrOptions& options) {
  check_options("scheduler warmup_cosine", options);
  if (options.decay_steps > 0 && options.decay_steps < options.warmup_steps) {
    throw UsageError(
        "scheduler warmup_cosine: decay_steps: " + std::to_string(options.decay_steps) +
        "; expected at least warmup_steps (" + std::to_string(options.warmup_steps) + "), or 0");
  }
  return [options, rising = constant_lr({options.warmup_steps, options.by})](
             const Progress& progress, double base_lr) {
    const double t = engine::moment(progress, options.by);
    const auto warmup = static_cast<double>(options.warmup_steps);
    if (t < warmup) return rising(progress, base_lr);
    const double end = options.decay_steps > 0 ? static_cast<double>(options.decay_steps)
                                               : engine::total(progress, options.by);
    return t >= end ? options.min_lr
                    : cosine_between(base_lr, options.min_lr, (t - warmup) / (end - warmup));
  };
}

void LinearLrOptions::read(OptionReader& options) {
  options.read("start_factor", start_factor, "factor of lr at the start", Range{0, 1, true, false});
  options.read("end_factor", end_factor, "factor of lr from total_iters on", Range{0, 1});
  options.read("total_iters", total_iters, "length of the change", kAtLeastOne);
  read_by(options, by);
}

LrSchedule linear_lr(const LinearLrOptions& options) {
  check_options("scheduler linear", options);
  return [options](const Progress& progress, double base_lr) {
    const auto last = static_cast<double>(options.total_iters);
    const double done = std::min(engine::moment(progress, options.by), last) / last;
    return base_lr * (options.start_factor + (options.end_factor - options.start_factor) * done);
  };
}

void StepLrOptions::read(OptionReader& options) {
  options.require("step_size", "a whole number >= 1");
  options.read("step_size", step_size, "lr is multiplied by gamma once per step_size", kAtLeastOne);
  options.read("gamma", gamma, "factor", kPositive);
  read_by(options, by);
}

LrSchedule step_lr(const StepLrOptions& options) {
  check_options("scheduler step", options);
  return [options](const Progress& progress, double base_lr) {
    const double drops =
        std::floor(engine::moment(progress, options.by) / static_cast<double>(options.step_size));
    return base_lr * std::pow(options.gamma, drops);
  };
}

void MultiStepLrOptions::read(OptionReader& options) {
  options.require("milestones", "a list of whole numbers >= 1");
  options.read("milestones", milestones, "where lr is multiplied by gamma, in ascending order",
               kAtLeastOne);
  options.read("gamma", gamma, "factor", kPositive);
  read_by(options, by);
}

LrSchedule multi_step_lr(const MultiStepLrOptions& options) {
  check_options("scheduler multi_step", options);
  const auto& milestones = options.milestones;
  const bool ascending = std::adjacent_find(milestones.begin(), milestones.end(),
                                            std::greater_equal<>()) == milestones.end();
  if (milestones.empty() || !ascending) {
    throw UsageError(
        "scheduler multi_step: milestones: " +
        to_string(OptionValue(std::vector<double>(milestones.begin(), milestones.end()))) +
        "; expected at least one whole number >= 1, in ascending order");
  }
  return [options](const Progress& progress, double base_lr) {
    const auto t = static_cast<int64_t>(engine::moment(progress, options.by));
    const auto passed = std::upper_bound(options.milestones.begin(), options.milestones.end(), t);
    return base_lr *
           std::pow(options.gamma, static_cast<double>(passed - options.milestones.begin()));
  };
}

void ExponentialLrOptions::read(OptionReader& options) {
  options.require("gamma", "a number > 0");
  options.read("gamma", gamma, "factor per step or epoch", kPositive);
  read_by(options, by);
}

LrSchedule exponential_lr(const ExponentialLrOptions& options) {
  check_options("scheduler exponential", options);
  return [options](const Progress& progress, double base_lr) {
    return base_lr * std::pow(options.gamma, engine::moment(progress, options.by));
  };
}

void PolynomialLrOptions::read(OptionReader& options) {
  options.read("total_iters", total_iters, "where lr reaches 0", kAtLeastOne);
  options.read("power", power, "power of the decay", kPositive);
  read_by(options, by);
}

LrSchedule polynomial_lr(const PolynomialLrOptions& options) {
  check_options("scheduler polynomial", options);
  return [options](const Progress& progress, double base_lr) {
    const auto last = static_cast<double>(options.total_iters);
    return base_lr *
           std::pow(1 - std::min(engine::moment(progress, options.by), last) / last, options.power);
  };
}

void CosineLrOptions::read(OptionReader& options) {
  options.require("t_max", "a whole number >= 1");
  options.read("t_max", t_max, "half a period", kAtLeastOne);
  options.read("eta_min", eta_min, "lowest learning rate", kNotNegative);
  read_by(options, by);
}

LrSchedule cosine_lr(const CosineLrOptions& options) {
  check_options("scheduler cosine", options);
  return [options](const Progress& progress, double base_lr) {
    const double p = engine::moment(progress, options.by) / static_cast<double>(options.t_max);
    return cosine_between(base_lr, options.eta_min, p);
  };
}

}  // namespace tessera
