#include "train/program/run_with_rollbacks.h"

#include <fmt/format.h>

#include "tessera/detail/report_to_launcher.h"
#include "tessera/step/agreement.h"
#include "train/run/run_loop.h"

namespace tessera::train {
namespace {

/// Puts the steps of `before` that `after` has not repeated before the steps of `after`.
void prepend(const TrainResult& before, TrainResult& after) {
  const int64_t kept = std::max<int64_t>(0, after.first_step - before.first_step);
  const auto insert = [kept](const std::vector<double>& from, std::vector<double>& to) {
    to.insert(to.begin(), from.begin(),
              from.begin() + std::min(kept, static_cast<int64_t>(from.size())));
  };
  insert(before.losses, after.losses);
  insert(before.grad_norms, after.grad_norms);
  after.first_step = before.first_step;
  after.skipped_steps += before.skipped_steps;
  after.rollbacks += before.rollbacks;
}

}  // namespace

TrainResult run_with_rollbacks(const Config& config, ProcessGroup group, Heartbeat& heartbeat,
                               const std::function<void()>& on_start) {
  Config again = config;
  again.checkpoint.resume = true;
  std::set<int64_t> left_out;
  std::optional<TrainResult> before;
  int64_t in_a_row = 0;
  for (;;) {
    Run run(before ? again : config, group, left_out, heartbeat);
    on_start();
    TrainResult result = RunLoop(run).run();
    if (before) prepend(*before, result);
    if (!run.rollback()) {
      if (result.interrupted_by != 0)
        detail::report_stop(result.interrupted_by, run.interrupted_here()
                                                       ? std::vector<int>{group.rank()}
                                                       : std::vector<int>());
      return result;
    }
    ++result.rollbacks;
    const int64_t step = *run.rollback();
    if (left_out.count(step) > 0)
      throw AgreedError(
          fmt::format("{}rollback: something is not finite after step {} again, although that step "
                      "was left out",
                      config.at("train.on_nonfinite"), step));
    in_a_row = left_out.count(step - 1) > 0 ? in_a_row + 1 : 1;
    if (in_a_row > config.train.nonfinite_limit)
      throw AgreedError(
          fmt::format("{}{}, and steps {} to {} are {} in a row that were to be rolled back",
                      config.at("train.nonfinite_limit"), config.train.nonfinite_limit,
                      step - in_a_row + 1, step, in_a_row));
    left_out.insert(step);
    before = std::move(result);
  }
}

}  // namespace tessera::train

namespace tessera {

TrainResult run_training(const Config& config, ProcessGroup group) {
  train::Heartbeat unwatched;
  return train::run_with_rollbacks(config, std::move(group), unwatched, [] {});
}

}  // namespace tessera
