#include "train/run/run_data.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/error.h"
#include "train/config/config_sections.h"

namespace tessera::train {
namespace {

/// Samples [begin, begin + count) of a batch.
Batch part_of(const Batch& batch, int64_t begin, int64_t count) {
  Batch part{batch.inputs.narrow(0, begin, count),
             batch.targets.defined() ? batch.targets.narrow(0, begin, count) : at::Tensor(),
             {}};
  for (const auto& [name, tensor] : batch.extra) part.extra[name] = tensor.narrow(0, begin, count);
  return part;
}

}  // namespace

RunData::RunData(const RunContext& context, std::nullopt_t)
    : config_(context.config),
      rank_(context.group.rank()),
      world_(context.group.size()),
      device_(context.device) {}

RunData::RunData(const RunContext& context) : RunData(context, std::nullopt) {
  require_datasets(config_);
  splits_ = config_.data.plan.load();
  if (!splits_.train)
    throw UsageError(config_.at("data.type") + config_.data.type + " gives no training data");
  if (!config_.evaluates()) splits_.val = splits_.test = nullptr;
  sampler_.emplace(splits_.train->size(), config_.data.order, config_.data.seed);
  assignment_.emplace(steps(), config_.train.global_batch, world_);
  if (uneven() && iterations() == 0 && assignment_->total > 0)
    throw UsageError(config_.at("data.uneven") + "drop leaves no step in which every rank has " +
                     std::to_string(assignment_->per_rank) +
                     " sequences; expected more steps, or join");
}

int64_t RunData::steps() const {
  const double epochs = config_.train.epochs;
  if (!(epochs > 0)) return config_.train.steps;
  const int64_t samples = sampler_->size(), batch = config_.train.global_batch;
  const double whole =
      std::floor(epochs * static_cast<double>(samples) / static_cast<double>(batch));
  // Samples are counted in 64 bits, rounded up to whole iterations of any world size.
  constexpr double kMostOfEpochs = 4e18;
  if (whole > kMostOfEpochs / static_cast<double>(batch))
    throw UsageError(
        config_.at("train.epochs") +
        fmt::format("{} times {} samples; expected at most 4e18 samples in all", epochs, samples));
  if (whole < 1)
    throw UsageError(config_.at("train.epochs") +
                     fmt::format("less than one step of {} samples in {}; expected more epochs or "
                                 "a smaller train.global_batch",
                                 batch, samples));
  return static_cast<int64_t>(whole);
}

Progress RunData::progress(int64_t iteration) const {
  // An iteration has more samples than global_batch if the world size does not divide it.
  const auto epochs_before = [this](int64_t end) {
    return static_cast<double>(assignment_->used_before(end)) /
           static_cast<double>(sampler_->size());
  };
  const int64_t all = iterations();
  return {iteration, all, epochs_before(iteration), epochs_before(all)};
}

double RunData::weight_of(int64_t samples, int active_ranks, int64_t iteration) const {
  if (!joins()) return 1;
  return static_cast<double>(samples * active_ranks) / static_cast<double>(samples_in(iteration));
}

SamplerState RunData::state(int64_t iteration) const {
  return {assignment_->used_before(iteration), sampler_->size(), config_.data.order,
          config_.data.seed};
}

void RunData::load_state(const SamplerState& state, int64_t iteration) {
  sampler_->load_state(state);
  assignment_->start_iteration = iteration;
  assignment_->start_sample = state.position;
}

void RunData::start(int64_t iteration) {
  const auto samples_of = [this](int64_t number) {
    const auto part = assignment_->samples(number, rank_);
    return sampler_->samples(part.first, part.count);
  };
  const BatchLoaderOptions options{config_.data.loader_threads, config_.data.prefetch};
  loader_ = std::make_unique<BatchLoader>(splits_.train, samples_of, iteration,
                                          std::max(iteration, iterations()), options);
}

std::vector<Batch> RunData::parts_of(Batch batch) {
  batch = copies_.to_device(std::move(batch), device_);
  const int64_t parts = config_.train.accumulation;
  if (parts == 1) return {std::move(batch)};
  const int64_t size = batch.inputs.size(0) / parts, longer = batch.inputs.size(0) % parts;
  std::vector<Batch> result;
  for (int64_t i = 0, first = 0; i < parts; ++i) {
    result.push_back(part_of(batch, first, size + (i < longer)));
    first += result.back().inputs.size(0);
  }
  return result;
}

}  // namespace tessera::train
