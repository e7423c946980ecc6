#include "train/state/best_evaluations.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::train {
namespace {

constexpr const char* kBuffers = "best-buffers.safetensors";

std::string other_ranking(const char* key, const std::string& before, bool larger,
                          const Ranking& now) {
  const auto mode = [](bool max) { return max ? "max" : "min"; };
  return fmt::format(
      "warning: {} ranked by {} before, mode {}; the best ones are counted anew, by {}, mode {}",
      key, before, mode(larger), now.metric, mode(now.larger));
}

bool better(const Ranking& ranking, double a, double b) { return ranking.larger ? a > b : a < b; }

}  // namespace

BestEvaluations::BestEvaluations(const Config& config)
    : stop_config_(config.train.early_stop), keep_config_(config.checkpoint.keep_best) {
  if (stop_config_.patience == 0) return;
  EarlyStopOptions options{.patience = stop_config_.patience, .min_delta = stop_config_.min_delta};
  if (stop_config_.ranking.larger) options.mode = EarlyStopOptions::Mode::greater;
  stop_.emplace(options);
}

BestEvaluations::Verdict BestEvaluations::observe(int64_t step,
                                                  const std::map<std::string, double>& figures) {
  Verdict verdict;
  if (stop_) {
    const double value = figures.at(stop_config_.ranking.metric);
    verdict.stop = stop_->observe(value);
    verdict.best_weights =
        std::isfinite(value) && (!best_ || better(stop_config_.ranking, value, best_->value));
    if (verdict.best_weights) best_ = {step, value};
  }
  const double value = figures.at(keep_config_.ranking.metric);
  std::erase_if(kept_, [step](const auto& other) { return other.step == step; });
  if (!std::isfinite(value)) return verdict;
  const auto worse = std::find_if(kept_.begin(), kept_.end(), [&](const auto& other) {
    return better(keep_config_.ranking, value, other.value);
  });
  kept_.insert(worse, {step, value});
  if (static_cast<int64_t>(kept_.size()) > keep_config_.count) kept_.pop_back();
  return verdict;
}

std::vector<int64_t> BestEvaluations::kept() const {
  std::vector<int64_t> steps;
  for (const auto& each : kept_) steps.push_back(each.step);
  return steps;
}

bool BestEvaluations::keeps(int64_t step) const {
  return std::any_of(kept_.begin(), kept_.end(),
                     [step](const auto& each) { return each.step == step; });
}

std::string BestEvaluations::note(int64_t step) const {
  for (const auto& each : kept_)
    if (each.step == step)
      return fmt::format(", best {} {:.4f}", keep_config_.ranking.metric, each.value);
  return "";
}

void BestEvaluations::take_weights(const std::vector<at::Tensor>& shards,
                                   const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  weights_.clear();
  buffers_.clear();
  for (const auto& shard : shards) weights_.push_back(shard.detach().clone());
  for (const auto& buffer : module.named_buffers(true))
    if (buffer.value().defined()) buffers_.emplace_back(buffer.key(), buffer.value().clone());
}

std::optional<int64_t> BestEvaluations::give_weights(ModelWrapper& wrapper) const {
  if (!best_) return std::nullopt;
  const torch::NoGradGuard no_grad;
  wrapper.before_shard_writes();
  const auto shards = wrapper.shards();
  for (size_t i = 0; i < shards.size(); ++i) at::Tensor(shards[i].tensor).copy_(weights_[i]);
  wrapper.publish_shards();
  auto buffers = wrapper.model().module->named_buffers(true);
  for (const auto& [name, value] : buffers_) buffers[name].copy_(value);
  return best_->step;
}

void BestEvaluations::add_buffers(CheckpointWriter& writer) const {
  if (!buffers_.empty()) writer.add_tensors(kBuffers, buffers_);
}

void BestEvaluations::load_weights(const Checkpoint& checkpoint, std::vector<at::Tensor> weights) {
  if (!best_) return;
  if (std::any_of(weights.begin(), weights.end(), [](const auto& w) { return !w.defined(); }))
    throw UsageError(
        fmt::format("{}: the weights of the best evaluation, after {} steps, lack a "
                    "parameter; expected those of all",
                    checkpoint.path(), best_->step));
  weights_ = std::move(weights);
  if (!checkpoint.contains(kBuffers)) return;
  for (const auto& name : checkpoint.tensors(kBuffers).names())
    buffers_.emplace_back(name, checkpoint.load_tensor(kBuffers, name));
}

void BestEvaluations::save_state(BestState& state) const {
  if (stop_) {
    state.early_stop = stop_->state();
    state.stop_metric = stop_config_.ranking.metric;
    state.stop_larger = stop_config_.ranking.larger;
  }
  state.weights = best_;
  if (keep_config_.count == 0) return;
  state.kept = {keep_config_.ranking.metric, keep_config_.ranking.larger, kept_};
}

std::vector<std::string> BestEvaluations::load_state(const BestState& state, bool own) {
  std::vector<std::string> warnings;
  const Ranking& ranking = stop_config_.ranking;
  const std::string& before = state.stop_metric;
  if (stop_ && !before.empty() &&
      (before != ranking.metric || state.stop_larger != ranking.larger)) {
    warnings.push_back(other_ranking("train.early_stop", before, state.stop_larger, ranking));
  } else if (stop_) {
    if (state.early_stop) {
      auto saved = *state.early_stop;
      saved.stopped = saved.stopped && own && saved.waited >= stop_config_.patience;
      stop_->load_state(saved);
    }
    best_ = state.weights;
  }
  if (!own || !state.kept || keep_config_.count == 0) return warnings;
  const auto& [metric, larger, steps] = *state.kept;
  if (metric != keep_config_.ranking.metric || larger != keep_config_.ranking.larger) {
    warnings.push_back(other_ranking("checkpoint.keep_best", metric, larger, keep_config_.ranking));
    return warnings;
  }
  kept_ = steps;
  if (static_cast<int64_t>(kept_.size()) > keep_config_.count)
    kept_.resize(static_cast<size_t>(keep_config_.count));
  return warnings;
}

}  // namespace tessera::train
