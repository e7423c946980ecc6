#include "tessera/step/lr_scheduler.h"

#include <cmath>
#include <limits>
#include <numbers>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::thrown_by;

constexpr auto kEpoch = ScheduleBy::epoch;

/// Step `step` of 12, in 4 epochs of 3 steps.
Progress at_step(int64_t step) { return {step, 12, static_cast<double>(step) / 3, 4}; }

std::vector<double> rates(const LrSchedule& schedule, double base_lr = 0.1) {
  std::vector<double> result;
  for (int64_t step = 0; step < 12; ++step) result.push_back(schedule(at_step(step), base_lr));
  return result;
}

void expect_rates(const LrSchedule& schedule, const std::vector<double>& expected) {
  const auto got = rates(schedule);
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-15) << "step " << i;
}

// The tables were computed by torch.optim.lr_scheduler of PyTorch 1.13 (Debian's python3-torch)
// with the same options: param_groups[0]["lr"] of an SGD with lr = 0.1, before each of 12 calls of
// scheduler.step(), printed with 15 digits.

TEST(LrScheduler, LinearIsPyTorchs) {
  expect_rates(
      linear_lr({.start_factor = 0.25, .end_factor = 0.75, .total_iters = 4}),
      {0.025, 0.0375, 0.05, 0.0625, 0.075, 0.075, 0.075, 0.075, 0.075, 0.075, 0.075, 0.075});
}

TEST(LrScheduler, StepIsPyTorchs) {
  expect_rates(step_lr({.step_size = 3, .gamma = 0.5}),
               {0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025, 0.0125, 0.0125, 0.0125});
}

TEST(LrScheduler, MultiStepIsPyTorchs) {
  expect_rates(multi_step_lr({.milestones = {2, 5, 6}, .gamma = 0.1}),
               {0.1, 0.1, 0.01, 0.01, 0.01, 0.001, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001, 0.0001});
}

TEST(LrScheduler, ExponentialIsPyTorchs) {
  expect_rates(exponential_lr({.gamma = 0.9}),
               {0.1, 0.09, 0.081, 0.0729, 0.06561, 0.059049, 0.0531441, 0.04782969, 0.043046721,
                0.0387420489, 0.03486784401, 0.031381059609});
}

TEST(LrScheduler, PolynomialIsPyTorchs) {
  expect_rates(polynomial_lr({.total_iters = 6, .power = 2}),
               {0.1, 0.0694444444444445, 0.0444444444444445, 0.025, 0.0111111111111111,
                0.00277777777777778, 0, 0, 0, 0, 0, 0});
}

TEST(LrScheduler, CosineIsPyTorchs) {
  expect_rates(cosine_lr({.t_max = 8, .eta_min = 0.01}),
               {0.1, 0.0965745789630079, 0.0868198051533946, 0.072220754456429, 0.055,
                0.037779245543571, 0.0231801948466054, 0.0134254210369921, 0.01, 0.0134254210369921,
                0.0231801948466054, 0.037779245543571});
}

TEST(LrScheduler, ChainedIsPyTorchsSequentialLR) {
  // SequentialLR([LinearLR(0.1, 1.0, 3), CosineAnnealingLR(T_max=6, eta_min=0.001)],
  // milestones=[3])
  expect_rates(
      chained_lr(
          {.schedules = {{linear_lr({.start_factor = 0.1, .end_factor = 1, .total_iters = 3}), 0,
                          3},
                         {cosine_lr({.t_max = 6, .eta_min = 0.001}), 3}}}),
      {0.01, 0.04, 0.07, 0.1, 0.0933682574873297, 0.07525, 0.0505, 0.02575, 0.00763174251267028,
       0.001, 0.00763174251267028, 0.02575});
}

TEST(LrScheduler, ConstantRisesOverTheWarmUp) {
  const auto warm = constant_lr({.warmup_steps = 4});
  for (int64_t step = 0; step < 12; ++step) {
    const double expected = step < 4 ? 0.3 * static_cast<double>(step + 1) / 4.0 : 0.3;
    EXPECT_EQ(warm(at_step(step), 0.3), expected) << step;
  }
  EXPECT_EQ(constant_lr()(at_step(0), 0.3), 0.3);
}

/// The formula of the config's scheduler (docs/config.md). Both must agree in every bit.
double config_formula(int64_t s, double lr, int64_t warmup, int64_t end, double min_lr) {
  if (s < warmup) return lr * static_cast<double>(s + 1) / static_cast<double>(warmup);
  if (s >= end) return min_lr;
  const double p = static_cast<double>(s - warmup) / static_cast<double>(end - warmup);
  return min_lr + (lr - min_lr) * (1 + std::cos(std::numbers::pi * p)) / 2;
}

TEST(LrScheduler, WarmupCosineIsTheConfigsFormulaBitByBit) {
  const auto to_the_end = warmup_cosine_lr({.warmup_steps = 13, .min_lr = 3e-5});
  const auto to_step_70 = warmup_cosine_lr({.warmup_steps = 13, .decay_steps = 70, .min_lr = 3e-5});
  for (int64_t step = 0; step < 103; ++step) {
    const Progress progress{step, 97, 0, 0};
    EXPECT_EQ(to_the_end(progress, 7e-4), config_formula(step, 7e-4, 13, 97, 3e-5)) << step;
    EXPECT_EQ(to_step_70(progress, 7e-4), config_formula(step, 7e-4, 13, 70, 3e-5)) << step;
  }
}

TEST(LrScheduler, ByEpochChangesBetweenEpochsOnly) {
  const std::vector<std::pair<LrSchedule, LrSchedule>> by_step_and_epoch = {
      {constant_lr({.warmup_steps = 2}), constant_lr({.warmup_steps = 2, .by = kEpoch})},
      {warmup_cosine_lr({.warmup_steps = 1, .decay_steps = 3}),
       warmup_cosine_lr({.warmup_steps = 1, .decay_steps = 3, .by = kEpoch})},
      {linear_lr({.total_iters = 3}), linear_lr({.total_iters = 3, .by = kEpoch})},
      {step_lr({.step_size = 2}), step_lr({.step_size = 2, .by = kEpoch})},
      {multi_step_lr({.milestones = {1, 3}}), multi_step_lr({.milestones = {1, 3}, .by = kEpoch})},
      {exponential_lr({.gamma = 0.7}), exponential_lr({.gamma = 0.7, .by = kEpoch})},
      {polynomial_lr({.total_iters = 3}), polynomial_lr({.total_iters = 3, .by = kEpoch})},
      {cosine_lr({.t_max = 4}), cosine_lr({.t_max = 4, .by = kEpoch})},
  };
  for (size_t i = 0; i < by_step_and_epoch.size(); ++i) {
    const auto steps = rates(by_step_and_epoch[i].first);
    const auto epochs = rates(by_step_and_epoch[i].second);
    for (size_t step = 0; step < 12; ++step)
      EXPECT_EQ(epochs[step], steps[step / 3]) << "schedule " << i << ", step " << step;
    EXPECT_NE(epochs.front(), epochs.back()) << "schedule " << i;
  }
  const auto to_the_end = warmup_cosine_lr({.by = kEpoch});
  EXPECT_EQ(to_the_end(at_step(8), 1), config_formula(2, 1, 0, 4, 0));
}

TEST(LrScheduler, AnEpochThatRoundingMadeTooSmallCountsAsWhole) {
  const double nearly_three = 0.1 + 0.2 + 2.7 - 4e-16;
  ASSERT_LT(nearly_three, 3);
  EXPECT_EQ(step_lr({.step_size = 3, .gamma = 0.5, .by = kEpoch})({0, 0, nearly_three, 9}, 1), 0.5);
}

TEST(LrScheduler, ChainedKeepsTheLastRateBetweenSchedules) {
  const auto factor = [](double x) { return step_lr({.step_size = 1, .gamma = x}); };
  const auto chain = chained_lr({.schedules = {{factor(0.5), 2, 4}, {factor(0.1), 7, 9}}});
  const double c = 0.1 * 0.1;
  expect_rates([&](const Progress& p, double lr) { return chain(p, lr) * 10; },
               {1, 1, 1, 0.5, 0.25, 0.25, 0.25, 1, 0.1, c, c, c});
}

TEST(LrScheduler, ChainedPassesEachScheduleItsOwnProgress) {
  std::vector<Progress> seen;
  const LrSchedule note = [&](const Progress& progress, double) {
    return seen.push_back(progress), 0.0;
  };
  const auto expect = [&](int64_t step, int64_t steps, double epoch, double epochs) {
    EXPECT_EQ(seen.back().step, step);
    EXPECT_EQ(seen.back().steps, steps);
    EXPECT_DOUBLE_EQ(seen.back().epoch, epoch);
    EXPECT_DOUBLE_EQ(seen.back().epochs, epochs);
  };
  const auto by_step = chained_lr({.schedules = {{note, 0, 6}, {note, 6}}});
  by_step(at_step(4), 1), expect(4, 6, 4.0 / 3, 2);
  by_step(at_step(6), 1), expect(0, 6, 0, 2);
  by_step(at_step(11), 1), expect(5, 6, 11.0 / 3 - 2, 2);
  by_step(at_step(15), 1), expect(6, 6, 2, 2);
  const auto by_epoch = chained_lr({.schedules = {{note, 0, 1}, {note, 1, 3}}, .by = kEpoch});
  by_epoch(at_step(2), 1), expect(2, 3, 2.0 / 3, 1);
  by_epoch(at_step(4), 1), expect(1, 6, 1.0 / 3, 2);
  by_epoch(at_step(11), 1), expect(6, 6, 2, 2);
}

TEST(LrScheduler, ChainedConvertsBetweenStepsAndEpochs) {
  const auto chain =
      chained_lr({.schedules = {{constant_lr({.warmup_steps = 3}), 0, 1},
                                {step_lr({.step_size = 1, .gamma = 0.5, .by = kEpoch}), 1}},
                  .by = kEpoch});
  expect_rates(chain,
               {0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025});
}

TEST(LrScheduler, OptionsOutOfRangeNameSchedulerAndOption) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(thrown_by([] { constant_lr({.warmup_steps = -1}); }),
            "scheduler constant: warmup_steps: -1; expected a whole number >= 0");
  EXPECT_EQ(thrown_by([] { warmup_cosine_lr({.warmup_steps = 9, .decay_steps = 8}); }),
            "scheduler warmup_cosine: decay_steps: 8; expected at least warmup_steps (9), or 0");
  EXPECT_THAT(thrown_by([] { warmup_cosine_lr({.min_lr = -1e-3}); }),
              HasSubstr("warmup_cosine: min_lr: -0.001"));
  EXPECT_THAT(thrown_by([] { linear_lr({.start_factor = 0}); }),
              HasSubstr("linear: start_factor: 0; expected a number > 0 and <= 1"));
  EXPECT_THAT(thrown_by([] { linear_lr({.end_factor = 1.5}); }),
              HasSubstr("linear: end_factor: 1.5"));
  EXPECT_THAT(thrown_by([] { linear_lr({.total_iters = 0}); }),
              HasSubstr("linear: total_iters: 0"));
  EXPECT_THAT(thrown_by([] { step_lr({}); }),
              HasSubstr("step: step_size: 0; expected a whole number >= 1"));
  EXPECT_THAT(thrown_by([&] { step_lr({.step_size = 1, .gamma = nan}); }),
              HasSubstr("step: gamma: nan"));
  EXPECT_THAT(thrown_by([] { multi_step_lr({}); }), HasSubstr("multi_step: milestones: []"));
  EXPECT_THAT(thrown_by([] {
                multi_step_lr({.milestones = {3, 3}});
              }),
              HasSubstr("milestones: [3, 3]; expected"));
  EXPECT_THAT(thrown_by([] {
                multi_step_lr({.milestones = {0, 3}});
              }),
              HasSubstr("milestones: 0; expected a list, each a whole number >= 1"));
  EXPECT_THAT(thrown_by([] { exponential_lr({}); }),
              HasSubstr("exponential: gamma: 0; expected a number > 0"));
  EXPECT_THAT(thrown_by([] { polynomial_lr({.power = -1}); }), HasSubstr("polynomial: power: -1"));
  EXPECT_THAT(thrown_by([] { cosine_lr({.t_max = 0}); }), HasSubstr("cosine: t_max: 0"));
}

TEST(LrScheduler, FaultyChainsNameTheLink) {
  const auto one = constant_lr();
  const auto chain = [](std::vector<ChainedLrOptions::Link> links) {
    return thrown_by([&] { chained_lr({.schedules = links}); });
  };
  EXPECT_EQ(chain({}), "scheduler chained: schedules: empty; expected at least one");
  EXPECT_THAT(chain({{one, 0, 5}, {nullptr, 5, 6}}), HasSubstr("schedules[1].schedule: empty"));
  EXPECT_THAT(chain({{one, 0, 5}, {one, 4, 6}}),
              HasSubstr("schedules[1].begin: 4; expected a whole number >= 5"));
  EXPECT_THAT(chain({{one, 3, 3}}),
              HasSubstr("schedules[0].end: 3; expected more than its begin (3)"));
  EXPECT_THAT(chain({{one, 0}, {one, 5}}), HasSubstr("schedules[0].end: -1"));
  EXPECT_EQ(chain({{one, 0, 5}, {one, 7}}), "no error");
}

}  // namespace
}  // namespace tessera
