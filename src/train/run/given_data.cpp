#include "train/run/given_data.h"

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::train {
namespace {

/// A schedule is a pure function, so it can be asked for other numbers of steps and epochs.
void check_schedule(const Config& config) {
  if (!config.scheduler) return;
  constexpr double kRate = 1;
  constexpr int64_t kSteps = 1000, kMoreSteps = 7000;
  for (int64_t step = 0; step < kSteps; step += 37) {
    const auto rate = [&](int64_t steps, double epoch) {
      return config.scheduler({step, steps, epoch, 10}, kRate);
    };
    if (rate(kSteps, 0) != rate(kSteps, 5))
      throw UsageError(config.at("scheduler.by") +
                       "epoch, and samples from the program have no epochs; expected step");
    if (config.train.steps == 0 && rate(kSteps, 0) != rate(kMoreSteps, 0))
      throw UsageError(config.at("train.steps") +
                       "missing, and the scheduler's rates depend on the number of steps; expected "
                       "the number of steps, or another scheduler");
  }
}

}  // namespace

GivenData::GivenData(const RunContext& context)
    : RunData(context, std::nullopt), ranks_(context.own_group().size()), active_(ranks_) {
  if (!config_.data.type.empty())
    throw UsageError(config_.at("data.type") + config_.data.type +
                     ", and the program gives the samples of a TrainingSession; expected no data");
  const auto refuse = [&](bool given, const char* key, const std::string& expected) {
    if (given)
      throw UsageError(config_.at(key) + config_.value(key) +
                       ", and the program gives the samples; expected " + expected);
  };
  refuse(config_.train.epochs > 0, "train.epochs", "train.steps, or none");
  refuse(config_.train.eval.every > 0, "train.eval_every", "0; TrainingSession::evaluate()");
  refuse(config_.train.on_nonfinite == "rollback", "train.on_nonfinite", "stop or skip");
  refuse(config_.train.rollback_on_spike.has_value(), "train.rollback_on_spike", "null");
  check_schedule(config_);
}

int64_t GivenData::iterations() const {
  return config_.train.steps > 0 ? config_.train.steps : kEndless;
}

void GivenData::set_counts(const std::vector<int64_t>& counts) {
  active_ = 0;
  total_ = 0;
  for (const int64_t count : counts) {
    active_ += count > 0;
    total_ += count;
  }
  position_ += total_;
}

double GivenData::weight_of(int64_t samples, int, int64_t) const {
  return static_cast<double>(samples * active_) / static_cast<double>(total_);
}

SamplerState GivenData::state(int64_t) const { return {position_, 0, SampleOrder::sequential, 0}; }

void GivenData::load_state(const SamplerState& state, int64_t) {
  if (state.size > 0)
    throw UsageError(
        fmt::format("the run had a dataset of {} samples; expected a run whose program "
                    "gave the samples",
                    state.size));
  position_ = state.position;
}

}  // namespace tessera::train
