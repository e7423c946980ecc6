#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "tessera/step/nonfinite.h"
#include "train/run/run.h"

// Losses, gradients and parameters that are not finite, and losses that jump. See docs/train.md.

namespace tessera::train {
namespace {

constexpr size_t kRecentLosses = 100;
constexpr size_t kFewestLosses = 20;  // before a loss can be a spike

double median(std::deque<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

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

}  // namespace

/// Called between backward and update. Whether the update takes place; the same on all ranks.
bool Run::allow_update() {
  if (weight_ > 0) add_figures();
  reduce_figures();
  const auto& factor = config_.train.rollback_on_spike;
  if (!std::isfinite(record_.loss)) {
    fault_ = Fault::loss;
  } else if (factor && recent_losses_.size() >= kFewestLosses &&
             record_.loss > *factor * median(recent_losses_)) {
    fault_ = Fault::spike;
  }
  // The norm then ends the run, with the error that this option promises.
  return fault_ == Fault::none || (fault_ == Fault::loss && config_.train.error_if_nonfinite);
}

/// Called after the update, with this rank's micro-batches. Collective after a fault.
void Run::handle_fault(const std::vector<Batch>& parts) {
  const bool scaled = config_.train.loss_scale.enabled;
  if (fault_ == Fault::none && !scaled && !std::isfinite(optimizer_->grad_norm())) {
    fault_ = Fault::gradient;
  }
  if (fault_ == Fault::none) {
    skips_in_a_row_ = 0;
    recent_losses_.push_back(record_.loss);
    if (recent_losses_.size() > kRecentLosses) recent_losses_.pop_front();
    return;
  }
  const std::string origin = fmt::format("step {}: {}", done_, origin_of_fault(parts));
  if (fault_ == Fault::spike || config_.train.on_nonfinite == "rollback") {
    return roll_back(origin);
  }
  if (config_.train.on_nonfinite == "stop") {
    return fail_in_step(origin + "; nothing of this step is saved");
  }
  const std::string parameter = nonfinite_parameter(own_group());
  if (!parameter.empty()) {
    return fail_in_step(
        parameter + "; without this step the parameter stays as it is, so \"skip\" does not help");
  }
  step_buffers_.restore();
  if (++skips_in_a_row_ > config_.train.nonfinite_limit) {
    return fail_in_step(
        fmt::format("{}; {} steps in a row were skipped before it, and "
                    "train.nonfinite_limit allows no more",
                    origin, config_.train.nonfinite_limit));
  }
  warn(origin + (groups_->several() ? "; this step is skipped in this group"
                                    : "; this step is skipped on all ranks"));
}

/// On the first rank of a group; group 0 has the reporter.
void Run::warn(const std::string& text) const {
  if (reporter_) {
    reporter_->line("warning: " + text);
  } else if (groups_->several() && own_group().rank() == 0) {
    std::printf("warning: %s%s\n", groups_->label().c_str(), text.c_str());
    std::fflush(stdout);
  }
}

void Run::roll_back(const std::string& reason) {
  rollback_ = done_;
  if (reporter_) {
    reporter_->line("warning: " + reason +
                    "; going back to the last sound checkpoint, and this step is left out");
  }
}

/// Ends the run with an error. Collective; the ranks of own_group() exchange its text.
void Run::fail(const std::string& reason) {
  const std::string& folder = config_.checkpoint.folder;
  ProcessGroup group = own_group();
  std::string advice;
  if (store_) {
    const auto sound = groups_->several() ? latest_sound_checkpoint(folder)
                                          : latest_sound_checkpoint(folder, group);
    advice = sound ? "; the last sound checkpoint is " + *sound
                   : "; there is no sound checkpoint in " + folder;
  }
  failure_ = group.broadcast_bytes(config_.at("train.on_nonfinite") + config_.train.on_nonfinite +
                                       ": " + reason + advice +
                                       "; a lower optimizer.lr, a warm-up or train.clip_grad_norm "
                                       "may help",
                                   0);
}

/// The same for a fault in a step, of which other groups do not know. Collective within
/// own_group().
void Run::fail_in_step(const std::string& reason) {
  fail(reason);
  if (groups_->several()) end_all_groups(failure_);
}

/// Throws AgreedError in this group; other groups get the error in their next collective.
/// Collective within own_group().
void Run::end_all_groups(const std::string& reason) {
  const std::string text = groups_->label() + reason;
  detail::report_agreed(began_, text);
  try {
    if (own_group().rank() == 0) group_.fail(text);
    ProcessGroup(own_group()).barrier("end of the run");
  } catch (const UsageError&) {
    // That of fail(), which adds the rank.
  }
  throw AgreedError(text);
}

std::string Run::origin_of_fault(const std::vector<Batch>& parts) {
  began_.clear();
  switch (fault_) {
    case Fault::loss:
      return origin_of_loss(parts);
    case Fault::gradient:
      return origin_of_gradient(parts);
    default:
      return fmt::format("the loss is {}, more than {} times the median {} of the last {}",
                         text_of(record_.loss), *config_.train.rollback_on_spike,
                         text_of(median(recent_losses_)), recent_losses_.size());
  }
}

/// "rank 1, update of step 4: parameter weight: NaN in 1 of 8 elements" for the first parameter
/// that is not finite; "" if all are. Collective.
std::string Run::nonfinite_parameter(ProcessGroup group) {
  std::string own;
  for (const auto& shard : wrapper_->shards()) {
    const std::string text = nonfinite_text(shard.tensor);
    if (!text.empty() && own.empty()) own = shard.parameter + ": " + text;
  }
  const auto ranks = group.all_gather_bytes(own, "first parameter that is not finite");
  const bool of_all = group.size() == group_.size();
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].empty()) continue;
    const int rank = of_all ? static_cast<int>(i) : groups_->rank_in_run(static_cast<int>(i));
    const std::string update =
        done_ > 0 ? fmt::format("update of step {}", done_ - 1) : std::string("initial weights");
    began_ = {rank};
    return fmt::format("rank {}, {}: parameter {}", rank, update, ranks[i]);
  }
  return "";
}

/// A parameter that is not finite comes from an earlier update. Otherwise forward made the loss
/// what it is.
std::string Run::origin_of_loss(const std::vector<Batch>& parts) {
  const std::string parameter = nonfinite_parameter(own_group());
  if (!parameter.empty()) {
    return fmt::format("{}; the loss of step {} is {}", parameter, done_, text_of(record_.loss));
  }
  ProcessGroup group = own_group();
  const double loss = figures_.empty() ? 0 : figures_.front().second;
  const auto losses = group.all_gather_bytes(std::isfinite(loss) ? "" : text_of(loss),
                                             "losses that are not finite");
  const auto inputs = group.all_gather_bytes(nonfinite_input(parts), "first input not finite");
  std::vector<int> ranks;
  size_t origin = losses.size();
  for (size_t rank = 0; rank < losses.size(); ++rank) {
    if (losses[rank].empty()) continue;
    origin = std::min(origin, rank);
    ranks.push_back(groups_->rank_in_run(static_cast<int>(rank)));
  }
  if (ranks.empty()) {
    return fmt::format("forward: the mean of finite losses is {}", text_of(record_.loss));
  }
  began_ = ranks;
  return fmt::format("{}, forward: the loss is {}; {}", ranks_text(ranks), losses[origin],
                     inputs[origin].empty() ? "its batch and all parameters are finite"
                                            : "its batch has " + inputs[origin]);
}

std::string Run::origin_of_gradient(const std::vector<Batch>& parts) {
  const std::string norm =
      "backward: the norm of the gradient is " + text_of(optimizer_->grad_norm());
  if (active_ranks_ > 0 && active_ranks_ < own_group().size()) {
    return norm + "; its origin is not searched for while a rank has no data";
  }
  const NonfiniteGradient origin = wrapper_->find_nonfinite_gradient(parts);
  if (origin.rank < 0) {
    return norm +
           ", although no rank's own gradient was found to have such elements; their sum or the "
           "sum of their squares overflowed, or a second pass gave other gradients";
  }
  const int rank = groups_->rank_in_run(origin.rank);
  began_ = {rank};
  return fmt::format("rank {}, {}; the first parameter whose gradient is not finite is {}", rank,
                     norm, origin.parameter);
}

/// After a checkpoint: parameters and optimizer state in it must be finite. Buffers may hold
/// infinities that are meant. Collective.
void Run::check_checkpoint() {
  std::string fault;
  if (first()) {
    std::istringstream lines(unsound_tensors(result_.checkpoint));
    for (std::string line; fault.empty() && std::getline(lines, line);) {
      const bool buffer = std::any_of(
          weights_.begin() + static_cast<std::ptrdiff_t>(parameter_count_), weights_.end(),
          [&](const auto& spec) { return line.find(": " + spec.name + ": ") != line.npos; });
      if (!buffer) fault = line;
    }
  }
  fault = group_.broadcast_bytes(fault, 0);
  if (fault.empty()) return;
  end_after_update(fmt::format("update of step {}: {} is marked as unsound: {}", done_ - 1,
                               result_.checkpoint, fault));
}

/// After the last step, whose update no later loss shows. Collective.
void Run::check_parameters() {
  if (result_.losses.empty()) return;
  const std::string origin = nonfinite_parameter(group_);
  if (!origin.empty()) end_after_update(origin);
}

/// The update of the step before has made something that is not finite.
void Run::end_after_update(const std::string& origin) {
  stop_ = true;
  if (config_.train.on_nonfinite != "rollback" || done_ == 0) return fail(origin);
  roll_back(origin);
  rollback_ = done_ - 1;
}

}  // namespace tessera::train
