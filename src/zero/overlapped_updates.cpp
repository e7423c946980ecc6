#include "zero/overlapped_updates.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "optim/text_of_options.h"
#include "tessera/error.h"
#include "zero/bucket_update.h"

namespace tessera::zero {

OverlappedUpdates::OverlappedUpdates(ProcessGroup group, Shards& shards, MeanGradient& mean,
                                     LocalOptimizer& local, NormTracker& norm,
                                     torch::optim::Optimizer& visible, bool find_unused,
                                     std::string prefix)
    : group_(std::move(group)),
      shards_(shards),
      mean_(mean),
      local_(local),
      norm_(norm),
      visible_(visible),
      find_unused_(find_unused),
      prefix_(std::move(prefix)) {}

void OverlappedUpdates::send(size_t index) {
  if (index == 0) {
    if (under_way()) {
      throw UsageError(prefix_ +
                       ": overlap_with_backward: a second backward before step(); put all but the "
                       "last of a step's into no_sync()");
    }
    local_.take_options_of(visible_);
    options_of_backward_.clear();
    for (const auto& group : visible_.param_groups())
      options_of_backward_.push_back(get_options(group.options()));
  }
  auto& bucket = shards_.buckets()[index];
  // The rest of this backward may read a parameter through detach(): autograd then refuses it,
  // because the update that begins here changes the values.
  shards_.bump_versions(bucket);
  const auto is_used = exchange_use(bucket);
  const int64_t numel = bucket.layout.counts()[group_.rank()];
  ProcessGroup::ConsumeRun consume;
  double scale = 1;
  if (auto* const fused = local_.one_pass(bucket)) {
    auto update = std::make_shared<BucketUpdate>(*fused, bucket, is_used, 1.0 / mean_.divisor,
                                                 norm_.tracking);
    consume = [this, update, numel](int64_t offset, const at::Tensor& run) {
      update->consume(offset, run);
      if (offset + run.numel() == numel) norm_.squares += update->squares();
    };
  } else {
    scale = 1.0 / mean_.divisor;
    consume = [this, index, is_used, numel](int64_t offset, const at::Tensor& run) {
      mean_.keep(index, offset, run);
      if (offset + run.numel() == numel) update_from_segment(index, is_used);
    };
  }
  // Options that differ between ranks are an error before anything is updated.
  std::string tag;
  for (size_t g = 0; index == 0 && g < options_of_backward_.size(); ++g)
    tag += fmt::format("options of group {}: {}; ", g, text_of_options(options_of_backward_[g]));
  tag += "gradients of " + bucket.names;
  sent_.push_back(group_.reduce_scatter_each_async(mean_.flat(index), bucket.layout.counts(),
                                                   callback_guard_.guard(std::move(consume)), scale,
                                                   tag));
  if (bucket.parameters.defined())
    sent_.push_back(group_.all_gather_async(bucket.parameters, bucket.layout.counts(),
                                            "parameters " + bucket.names));
}

/// Which of the bucket's parameters any rank used. The answer waits for the collective that is
/// started here.
std::function<bool(size_t)> OverlappedUpdates::exchange_use(const ShardBucket& bucket) {
  if (!find_unused_) {
    // A parameter that was frozen since the last step() gets no gradient.
    std::vector<size_t> frozen;
    for (const auto i : bucket.members) {
      if (!shards_.parameters()[i].tensor.requires_grad()) frozen.push_back(i);
    }
    return [frozen](size_t parameter) {
      return std::find(frozen.begin(), frozen.end(), parameter) == frozen.end();
    };
  }
  std::vector<int> have;
  for (const auto i : bucket.members)
    have.push_back(mean_.reducer()->has_gradient(mean_.position(i)));
  auto counts = at::tensor(have, at::kInt);
  sent_.push_back(group_.all_reduce_async(counts));
  return [&bucket, counts, sum = sent_.back()](size_t parameter) mutable {
    sum.wait();
    const auto member = std::find(bucket.members.begin(), bucket.members.end(), parameter);
    return counts[member - bucket.members.begin()].item<int>() > 0;
  };
}

void OverlappedUpdates::update_from_segment(size_t index,
                                            const std::function<bool(size_t)>& is_used) {
  auto& bucket = shards_.buckets()[index];
  const auto mean = mean_.segment(index);
  norm_.add(mean);
  LocalOptimizer::set_gradients(bucket, mean, is_used);
  local_.get().step();
  LocalOptimizer::clear_gradients(bucket);
}

void OverlappedUpdates::wait() {
  for (auto& work : std::exchange(sent_, {})) work.wait();
}

void OverlappedUpdates::check_options_unchanged() {
  const auto groups = std::min(options_of_backward_.size(), visible_.param_groups().size());
  for (size_t g = 0; g < groups; ++g) {
    const auto& before = options_of_backward_[g];
    for (const auto& [name, value] : get_options(visible_.param_groups()[g].options())) {
      const auto found = before.find(name);
      if (found != before.end() && found->second == value) continue;
      group_.fail(fmt::format(
          "{}: overlap_with_backward: option {} of group {} has changed since backward, which has "
          "updated with the former value; expected options to be set before forward, or after "
          "step()",
          prefix_, name, g));
    }
  }
}

}  // namespace tessera::zero
