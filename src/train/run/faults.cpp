#include "train/run/faults.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/checkpoint_store.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/step/nonfinite.h"

namespace tessera::train {
namespace {

/// "nan" without the sign, which says nothing.
std::string text_of(double value) {
  return std::isnan(value) ? "nan" : fmt::format("{:.6g}", value);
}

/// The first tensor of the batch that is not finite: "NaN in 1 of 64 elements of inputs".
std::string nonfinite_input(const std::vector<Batch>& parts) {
  for (const auto& part : parts) {
    std::vector<std::pair<std::string, at::Tensor>> tensors{{"inputs", part.inputs},
                                                            {"targets", part.targets}};
    tensors.insert(tensors.end(), part.extra.begin(), part.extra.end());
    for (const auto& [name, tensor] : tensors) {
      const std::string text = nonfinite_text(tensor);
      if (!text.empty()) return text + " of " + name;
    }
  }
  return "";
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "));
}

FaultRules rules_of(const RunConfig& config) {
  const std::string& rule = config.on_nonfinite;
  return {rule == "skip"       ? Verdict::skip
          : rule == "rollback" ? Verdict::roll_back
                               : Verdict::stop,
          config.rollback_on_spike, config.nonfinite_limit, config.error_if_nonfinite,
          config.loss_scale.enabled};
}

}  // namespace

Faults::Faults(const RunContext& context, ModelWrapper& wrapper)
    : context_(context), wrapper_(wrapper), policy_(rules_of(context.config.train)) {
  if (policy_.rules().on_nonfinite != Verdict::skip) return;
  const auto extra = wrapper_.extra_state();
  if (!extra.empty())
    throw UsageError(context_.config.at("train.on_nonfinite") + "skip, but " + extra.front().first +
                     " of parallel.comm_hook would keep what a step left in it; expected stop, "
                     "rollback or another hook");
  buffers_ = StepBuffers(wrapper_.model().module->buffers(true));
}

void Faults::end_step(int64_t step, const StepInput& input, const StepResult& result) {
  const auto [fault, verdict] = policy_.decide(result.record.loss, result.norm);
  if (verdict == Verdict::update) return;
  const auto origin = fmt::format("step {}: {}", step, origin_of(fault, step, input, result));
  if (verdict == Verdict::roll_back) return roll_back(step, origin);
  if (policy_.rules().on_nonfinite != Verdict::skip)
    return fail_in_step(origin + "; nothing of this step is saved");
  const std::string parameter = nonfinite_parameter(context_.own_group(), step);
  if (!parameter.empty())
    return fail_in_step(
        parameter + "; without this step the parameter stays as it is, so \"skip\" does not help");
  buffers_.restore();
  if (verdict == Verdict::stop)
    return fail_in_step(
        fmt::format("{}; {} steps in a row were skipped before it, and "
                    "train.nonfinite_limit allows no more",
                    origin, policy_.rules().most_skips));
  warn(origin + "; this step is skipped " + context_.groups->scope());
}

/// On the first rank of a group; group 0 has the reporter.
void Faults::warn(const std::string& text) const {
  if (context_.reporter) {
    context_.say("warning: " + text);
  } else if (context_.own_group().rank() == 0) {
    std::printf("warning: %s%s\n", context_.groups->label().c_str(), text.c_str());
    std::fflush(stdout);
  }
}

void Faults::roll_back(int64_t step, const std::string& reason) {
  rollback_ = step;
  context_.say("warning: " + reason +
               "; going back to the last sound checkpoint, and this step is left out");
}

/// Ends the run with an error. Collective; the ranks of own_group() exchange its text.
void Faults::fail(const std::string& reason) {
  const std::string& folder = context_.config.checkpoint.folder;
  ProcessGroup group = context_.own_group();
  std::string advice;
  if (!folder.empty()) {
    const auto sound = context_.groups->latest_sound(folder);
    advice = sound ? "; the last sound checkpoint is " + *sound
                   : "; there is no sound checkpoint in " + folder;
  }
  failure_ = group.broadcast_bytes(context_.config.at("train.on_nonfinite") +
                                       context_.config.train.on_nonfinite + ": " + reason + advice +
                                       "; a lower optimizer.lr, a warm-up or train.clip_grad_norm "
                                       "may help",
                                   0);
}

/// The same for a fault in a step that other groups do not know of. Collective within own_group().
void Faults::fail_in_step(const std::string& reason) {
  fail(reason);
  context_.groups->end_all(failure_, ranks_);
}

std::string Faults::origin_of(Fault fault, int64_t step, const StepInput& input,
                              const StepResult& result) {
  ranks_.clear();
  if (fault == Fault::loss) return origin_of_loss(step, input, result);
  if (fault == Fault::gradient) return origin_of_gradient(input, result);
  return fmt::format("the loss is {}, more than {} times the median {} of the last {}",
                     text_of(result.record.loss), *policy_.rules().spike, text_of(policy_.median()),
                     policy_.losses());
}

/// "rank 1, update of step 4: parameter weight: NaN in 1 of 8 elements" for the first parameter
/// that is not finite; "" if all are. Collective.
std::string Faults::nonfinite_parameter(ProcessGroup group, int64_t done) {
  std::string own;
  for (const auto& shard : wrapper_.shards()) {
    const std::string text = nonfinite_text(shard.tensor);
    if (!text.empty() && own.empty()) own = shard.parameter + ": " + text;
  }
  const auto ranks = group.all_gather_bytes(own, "first parameter that is not finite");
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].empty()) continue;
    const int rank = context_.groups->rank_in_run(group, static_cast<int>(i));
    const std::string update =
        done > 0 ? fmt::format("update of step {}", done - 1) : std::string("initial weights");
    ranks_ = {rank};
    return fmt::format("rank {}, {}: parameter {}", rank, update, ranks[i]);
  }
  return "";
}

/// A parameter that is not finite comes from an earlier update. Otherwise forward produced the
/// loss.
std::string Faults::origin_of_loss(int64_t step, const StepInput& input, const StepResult& result) {
  const std::string parameter = nonfinite_parameter(context_.own_group(), step);
  if (!parameter.empty())
    return fmt::format("{}; the loss of step {} is {}", parameter, step,
                       text_of(result.record.loss));
  ProcessGroup group = context_.own_group();
  const auto losses = group.all_gather_bytes(
      std::isfinite(result.own_loss) ? "" : text_of(result.own_loss), "losses that are not finite");
  const auto inputs =
      group.all_gather_bytes(nonfinite_input(input.parts), "first input not finite");
  std::vector<int> ranks;
  size_t origin = losses.size();
  for (size_t rank = 0; rank < losses.size(); ++rank) {
    if (losses[rank].empty()) continue;
    origin = std::min(origin, rank);
    ranks.push_back(context_.groups->rank_in_run(group, static_cast<int>(rank)));
  }
  if (ranks.empty())
    return fmt::format("forward: the mean of finite losses is {}", text_of(result.record.loss));
  ranks_ = ranks;
  return fmt::format("{}, forward: the loss is {}; {}", ranks_text(ranks), losses[origin],
                     inputs[origin].empty() ? "its batch and all parameters are finite"
                                            : "its batch has " + inputs[origin]);
}

std::string Faults::origin_of_gradient(const StepInput& input, const StepResult& result) {
  const std::string of = result.model.empty() ? "" : " of " + result.model;
  const std::string norm =
      fmt::format("backward{}: the norm of the gradient is {}", of, text_of(result.norm));
  if (!of.empty()) return norm + "; its origin is not searched for in a train_step";
  if (input.ranks_with_data > 0 && input.ranks_with_data < context_.own_group().size())
    return norm + "; its origin is not searched for while a rank has no data";
  const NonfiniteGradient origin = wrapper_.find_nonfinite_gradient(input.parts);
  if (origin.rank < 0)
    return norm +
           ", although no rank's own gradient was found to have such elements; their sum or the "
           "sum of their squares overflowed, or a second pass gave other gradients";
  const int rank = context_.groups->rank_in_run(context_.own_group(), origin.rank);
  ranks_ = {rank};
  return fmt::format("rank {}, {}; the first parameter whose gradient is not finite is {}", rank,
                     norm, origin.parameter);
}

void Faults::check_checkpoint(const std::string& path, const std::vector<std::string>& buffers,
                              int64_t done) {
  std::string fault;
  if (context_.first()) {
    std::istringstream lines(unsound_tensors(path));
    for (std::string line; fault.empty() && std::getline(lines, line);) {
      const bool buffer = std::any_of(buffers.begin(), buffers.end(), [&](const auto& name) {
        return line.find(": " + name + ": ") != line.npos;
      });
      if (!buffer) fault = line;
    }
  }
  fault = ProcessGroup(context_.group).broadcast_bytes(fault, 0);
  if (fault.empty()) return;
  end_after_update(
      fmt::format("update of step {}: {} is marked as unsound: {}", done - 1, path, fault), done);
}

void Faults::check_parameters(int64_t done) {
  const std::string origin = nonfinite_parameter(context_.group, done);
  if (!origin.empty()) end_after_update(origin, done);
}

/// The update of the step before has made a parameter that is not finite.
void Faults::end_after_update(const std::string& origin, int64_t done) {
  if (policy_.rules().on_nonfinite != Verdict::roll_back || done == 0) return fail(origin);
  roll_back(done - 1, origin);
}

}  // namespace tessera::train
