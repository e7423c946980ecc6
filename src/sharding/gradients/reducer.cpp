#include "sharding/gradients/reducer.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/error.h"

namespace tessera::sharding {

Reducer::Reducer(ProcessGroup group, std::vector<NamedTensor> parameters,
                 std::vector<Bucket> buckets, ReducerOptions options, ReductionPolicy* policy)
    : group_(std::move(group)),
      options_(std::move(options)),
      policy_(policy),
      buckets_(options_.component, group_.rank(), std::move(parameters),
               options_.gradient_as_bucket_view, refuse_own_norm(), options_.in_background) {
  set_buckets(std::move(buckets));
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : buckets_.parameters()) tensors.push_back(parameter.tensor);
  watch_ = std::make_unique<BackwardWatch>(
      tensors,
      BackwardWatch::Callbacks{
          [this] { begin(); },
          [this](size_t i, const at::Tensor& computed) { arrive(i, computed); },
          [this](bool complete) { complete ? end() : abandon(); }, options_.begin_before_first});
}

/// Empty where a norm of this rank's gradients equals the norm of all gradients.
std::function<void()> Reducer::refuse_own_norm() {
  if (options_.own_norm.empty() || group_.size() == 1) return {};
  return [this] {
    group_.fail(
        fmt::format("{}: rank {}: {}", options_.component, group_.rank(), options_.own_norm));
  };
}

void Reducer::replace_buckets(std::vector<Bucket> buckets) {
  std::lock_guard lock(mutex_);
  set_buckets(std::move(buckets));
}

void Reducer::set_buckets(std::vector<Bucket> buckets) {
  at::NoGradGuard no_grad;
  buckets_.set(std::move(buckets));
  lanes_.clear();
  for (size_t b = 0; b < buckets_.all().size(); ++b) {
    const auto lane = buckets_.all()[b].lane;
    if (lanes_.size() <= lane) lanes_.resize(lane + 1);
    lanes_[lane].buckets.push_back(b);
  }
  ArrivalTracker tracker(buckets_.buckets_of_parameters(), buckets_.all().size());
  for (size_t i = 0; options_.static_graph && i < size(); ++i)
    tracker.expect(i, graph_learned_ ? tracker_.expected(i) : ArrivalTracker::kUnbounded);
  tracker_ = std::move(tracker);
  reset();
}

void Reducer::reset() {
  tracker_.begin();
  missing_.assign(size(), 0);
  for (auto& lane : lanes_) lane.next = 0;
}

void Reducer::start() {
  const bool abandoned = std::exchange(abandoned_, false);
  if ((abandoned || options_.in_background) && policy_) policy_->abandon();
  buckets_.restore();
  reset();
}

void Reducer::begin() {
  if (options_.begin_before_first) policy_->begin();
  std::lock_guard lock(mutex_);
  start();
  buckets_.begin_backward();
}

void Reducer::arrive(size_t i, const at::Tensor& computed) {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  buckets_.store(i, computed, sync());
  if (!sends()) return;
  const int expected = tracker_.expected(i), arrivals = tracker_.arrive(i);
  if (arrivals > expected && sync()) {
    if (options_.static_graph) {
      throw UsageError(fmt::format(
          "{}: rank {}: parameter {} got gradient {} in this backward, and {} in the first one; "
          "expected the same number, because static_graph is set",
          options_.component, group_.rank(), name(i), arrivals, expected));
    }
    throw UsageError(fmt::format(
        "{}: rank {}: parameter {} got a second gradient in one backward; expected one (several "
        "backward passes before a step belong in no_sync(){})",
        options_.component, group_.rank(), name(i),
        options_.offers_static_graph
            ? ", a part of the model that is differentiated twice needs static_graph"
            : ""));
  }
  if (arrivals != expected) return;
  auto& lane = lanes_[buckets_.all()[buckets_.bucket_of(i)].lane];
  while (lane.next < lane.buckets.size() && tracker_.complete(lane.buckets[lane.next]))
    ready(lane.buckets[lane.next++]);
}

void Reducer::start_remaining_buckets() {
  for (auto& lane : lanes_)
    while (lane.next < lane.buckets.size()) ready(lane.buckets[lane.next++]);
}

void Reducer::ready(size_t bucket) {
  for (const auto i : buckets_.all()[bucket].members)
    if (options_.reduce_in_backward && missing_[i]) buckets_.zero(i);
  buckets_.prepare(bucket);
  if (options_.provisional) reported_[bucket] = true;
  policy_->start(bucket);
}

void Reducer::open_round() {
  std::lock_guard lock(mutex_);
  round_ = Round::open;
  reported_.assign(buckets_.all().size(), 0);
}

void Reducer::close_round() {
  std::lock_guard lock(mutex_);
  report_rest();
}

void Reducer::report_rest() {
  if (round_ == Round::none) return;
  round_ = Round::sent;
  for (size_t b = 0; b < reported_.size(); ++b)
    if (!reported_[b]) ready(b);
}

void Reducer::end() {
  {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    struct Reset {
      Reducer& reducer;
      ~Reset() { reducer.reset(); }
    } reset_at_the_end{*this};
    buckets_.end_backward(true);
    if (!sends()) return;
    if (!sync()) {
      collect_rest(Missing::zero);
      report_rest();
      return;
    }
    finish_reduction(Missing::by_options);
  }
  notify_finished();
}

void Reducer::notify_finished() {
  at::NoGradGuard no_grad;
  policy_->finished();
}

void Reducer::abandon() {
  std::lock_guard lock(mutex_);
  buckets_.end_backward(false);
  abandoned_ = true;
  if (round_ == Round::open && holds_ == 0) round_ = Round::sent;
  reset();
}

void Reducer::collect() {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  start();
  const auto have = collect_rest(Missing::by_options);
  report_rest();
  exchange_use(have);
}

void Reducer::return_gradients() {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  give_back();
}

void Reducer::flush() {
  {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    start();
    finish_reduction(Missing::by_options);
  }
  notify_finished();
}

void Reducer::shadow() {
  {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    buckets_.zero_grad(true);
    start();
    finish_reduction(Missing::zero);
  }
  notify_finished();
}

void Reducer::finish_reduction(Missing missing) {
  const auto have = collect_rest(missing, false);
  start_remaining_buckets();
  if (missing == Missing::by_options) learn_static_graph();
  exchange_use(have);  // after all buckets: ranks may have started different ones within backward
  last_order_ = tracker_.order();
  policy_->finish();
  give_back();
}

/// For parameters that have not arrived in this backward: an earlier backward under no_sync
/// accumulated their gradient, or it is missing. Returns the parameters that have a gradient.
/// Without `zero_now`, ready() writes the zeros of a bucket, so that only its own memory is used.
std::vector<char> Reducer::collect_rest(Missing rule, bool zero_now) {
  if (rule == Missing::by_options) {
    check_cleared();
    check_static_graph();
  }
  std::vector<std::string> missing;
  std::vector<char> have(size(), 1);
  const bool zero = rule == Missing::zero || may_be_unused();
  for (size_t i = 0; i < size(); ++i) {
    if (tracker_.arrivals(i) > 0) continue;
    have[i] = buckets_.parameters()[i].tensor.grad().defined();
    missing_[i] = !have[i];
    if (have[i]) buckets_.store_late(i);
    else if (!zero) missing.push_back(name(i));
    else if (zero_now) buckets_.zero(i);
  }
  if (!missing.empty()) {
    const auto shown = std::min<size_t>(missing.size(), 10);
    group_.fail(fmt::format(
        "{}: rank {}: backward left {} without a gradient: {}; set find_unused_parameters, or use "
        "every parameter in the loss, or construct the {} again if a module was replaced",
        options_.component, group_.rank(),
        missing.size() == 1 ? "a parameter" : fmt::format("{} parameters", missing.size()),
        fmt::join(missing.begin(), missing.begin() + shown, ", "), options_.component));
  }
  return have;
}

void Reducer::check_cleared() {
  const auto parameter = buckets_.uncleared();
  if (parameter.empty()) return;
  group_.fail(fmt::format("{}: rank {}: the gradient of parameter {} {}", options_.component,
                          group_.rank(), parameter, options_.overwritten));
}

void Reducer::check_attached() {
  const auto lost = watch_->lost_parameter();
  if (!lost) return;
  group_.fail(fmt::format(
      "{}: rank {}: the gradient of parameter {} is no longer collected, because its dtype, device "
      "or data was replaced (module->to(…), set_data); expected such changes before the {} is "
      "constructed",
      options_.component, group_.rank(), name(*lost), options_.component));
}

/// A parameter that the static graph has and this backward has not, for example one that was frozen
/// meanwhile, would otherwise count as one with a gradient of zero, and momentum would move it.
void Reducer::check_static_graph() {
  if (!options_.static_graph || !graph_learned_) return;
  for (size_t i = 0; i < size(); ++i) {
    const int expected = tracker_.expected(i), arrivals = tracker_.arrivals(i);
    if (expected == arrivals) continue;
    group_.fail(fmt::format(
        "{}: rank {}: parameter {} ({}) got {} gradients in this backward and {} in the first one; "
        "expected the same, because static_graph is set",
        options_.component, group_.rank(), name(i),
        buckets_.parameters()[i].tensor.requires_grad() ? "trainable" : "frozen now", arrivals,
        expected));
  }
}

void Reducer::learn_static_graph() {
  if (!options_.static_graph || std::exchange(graph_learned_, true)) return;
  for (size_t i = 0; i < size(); ++i) tracker_.expect(i, tracker_.arrivals(i));
}

void Reducer::exchange_use(const std::vector<char>& have) {
  if (std::exchange(use_is_known_, options_.static_graph)) return;
  used_.assign(size(), 1);
  if (options_.caller_tracks_use) used_ = have;
  if (!may_be_unused() || options_.caller_tracks_use) return;
  used_.resize(size());
  std::vector<int> flags(have.begin(), have.end());
  for (size_t b = 0; options_.provisional && b < buckets_.all().size(); ++b)
    flags.push_back(round_ == Round::none || policy_->changed(b));
  const size_t uses = flags.size();
  const auto scales = buckets_.take_scales();
  if (!scales.empty()) flags.push_back(std::find(have.begin(), have.end(), 1) != have.end());
  flags.insert(flags.end(), scales.begin(), scales.end());
  auto counts = at::empty({static_cast<int64_t>(flags.size())},
                          at::TensorOptions().dtype(at::kInt).device(group_.control_device()));
  counts.copy_(at::tensor(flags, at::kInt));
  group_.all_reduce(counts, 1, "parameters with a gradient");
  const auto host = counts.cpu();
  const auto* const sums = host.data_ptr<int>();
  std::transform(sums, sums + have.size(), used_.begin(), [](int ranks) { return ranks > 0; });
  changed_.resize(uses - have.size());
  std::transform(sums + have.size(), sums + uses, changed_.begin(),
                 [](int ranks) { return ranks > 0; });
  // Ranks with gradients have scaled them by equal numbers, or each by its own norm.
  if (std::any_of(sums + uses, sums + flags.size(),
                  [&](int ranks) { return ranks != 0 && ranks != sums[uses]; }))
    refuse_own_norm()();
}

void Reducer::give_back() {
  for (size_t i = 0; i < size(); ++i)
    if (used_[i]) buckets_.return_gradient(i);
}

std::vector<size_t> Reducer::arrival_order() const {
  std::vector<size_t> order = last_order_;
  std::vector<bool> present(size(), false);
  for (const auto i : order) present[i] = true;
  for (size_t i = 0; i < size(); ++i)
    if (!present[i]) order.push_back(i);
  return order;
}

void Reducer::zero_grad(bool set_to_none) {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  buckets_.zero_grad(set_to_none);
}

}  // namespace tessera::sharding
