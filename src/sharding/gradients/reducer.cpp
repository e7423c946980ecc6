#include "sharding/gradients/reducer.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "sharding/gradients/backward_watch.h"
#include "sharding/gradients/gradient_placement.h"
#include "tessera/error.h"

namespace tessera::sharding {
namespace {

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.data_ptr() == b.data_ptr() && a.strides() == b.strides();
}

/// Whether nobody but autograd holds the memory of `grad`, a parameter's, while the post hook runs
/// that got `computed`: that tensor, the one it is a view of, and `.grad` itself. Who has the
/// tensor makes autograd copy it for `.grad`; who has an alias of it does not.
bool held_by_autograd(const at::Tensor& grad, const at::Tensor& computed) {
  return computed.defined() && grad.storage().use_count() <= (computed.is_view() ? 3u : 2u);
}

}  // namespace

class Reducer::Impl {
 public:
  Impl(ProcessGroup group, std::vector<NamedTensor> parameters, ReducerOptions options,
       Callbacks callbacks)
      : group_(std::move(group)),
        parameters_(std::move(parameters)),
        options_(std::move(options)),
        callbacks_(std::move(callbacks)) {}

  void attach() {
    watch_ = std::make_unique<BackwardWatch>(
        tensors(), BackwardWatch::Callbacks{
                       [this] { begin(); },
                       [this](size_t i, const at::Tensor& computed) { arrived(i, computed); },
                       [this] { end(); }, [this] { abandon(); }});
  }

  void set_buckets(std::vector<Bucket> buckets) {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    where_.assign(parameters_.size(), {});
    for (size_t b = 0; b < buckets.size(); ++b) {
      for (size_t m = 0; m < buckets[b].members.size(); ++m) where_[buckets[b].members[m]] = {b, m};
    }
    std::swap(buckets_, buckets);
    displaced_.clear();
    released_by_autograd_.assign(parameters_.size(), 0);
    lanes_.clear();
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (lanes_.size() <= buckets_[b].lane) lanes_.resize(buckets_[b].lane + 1);
      lanes_[buckets_[b].lane].buckets.push_back(b);
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      auto& grad = parameters_[i].tensor.mutable_grad();
      if (!options_.gradient_as_bucket_view || !grad.defined() || grad.is_sparse()) continue;
      view(i).copy_(grad);
      grad = view(i);
    }
    std::vector<at::Tensor> windows;
    for (size_t i = 0; i < parameters_.size(); ++i)
      windows.push_back(options_.gradient_as_bucket_view ? view(i) : at::Tensor());
    placement_.set_windows(tensors(), windows);
    reset();
  }

  void arrived(size_t i, const at::Tensor& computed) {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    ++generation_;
    if (const auto& grad = parameters_[i].tensor.grad(); grad.defined())
      placement_.arrived(i, grad);
    take(i, computed);
    if (!sync_) return;
    ++arrivals_[i];
    if (arrivals_[i] > expected(i)) {
      throw UsageError(
          fmt::format("{}: rank {}: parameter {} got a second gradient in one backward; expected "
                      "one (several backward passes "
                      "before a step belong in no_sync(), a part of the model that is "
                      "differentiated twice needs static_graph)",
                      options_.component, group_.rank(), parameters_[i].name));
    }
    if (arrivals_[i] == 1) order_.push_back(i);
    if (arrivals_[i] == expected(i)) complete(i);
  }

  void flush() {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    start();
    std::fill(pending_.begin(), pending_.end(), 0);
    finish_all();
  }

  void shadow() {
    zero_grad(true);
    struct Flag {
      bool& flag;
      explicit Flag(bool& f) : flag(f) { flag = true; }
      ~Flag() { flag = false; }
    } flag(shadowing_);
    flush();
  }

  void zero_grad(bool set_to_none) {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    for (auto& parameter : parameters_) {
      auto& grad = parameter.tensor.mutable_grad();
      if (!grad.defined()) continue;
      if (set_to_none) grad = at::Tensor();
      else grad.zero_();
    }
  }

  std::vector<size_t> arrival_order() const {
    std::vector<size_t> order = last_order_;
    std::vector<bool> present(parameters_.size(), false);
    for (const auto i : order) present[i] = true;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!present[i]) order.push_back(i);
    }
    return order;
  }

  std::vector<Bucket> buckets_;
  bool sync_ = true;
  std::vector<size_t> order_;
  std::vector<char> used_;
  std::vector<char> missing_;
  uint64_t generation_ = 0;

 private:
  struct Place {
    size_t bucket = 0, member = 0;
  };
  struct Lane {
    std::vector<size_t> buckets;
    size_t next = 0;
  };

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto& parameter : parameters_) all.push_back(parameter.tensor);
    return all;
  }

  const at::Tensor& view(size_t i) const {
    return buckets_[where_[i].bucket].views[where_[i].member];
  }

  int expected(size_t i) const {
    if (!options_.static_graph) return 1;
    return expected_.empty() ? std::numeric_limits<int>::max() : expected_[i];
  }

  void reset() {
    arrivals_.assign(parameters_.size(), 0);
    missing_.assign(parameters_.size(), 0);
    order_.clear();
    for (auto& lane : lanes_) lane.next = 0;
    pending_.clear();
    for (const auto& bucket : buckets_) {
      pending_.push_back(std::count_if(bucket.members.begin(), bucket.members.end(),
                                       [&](size_t i) { return expected(i) > 0; }));
    }
  }

  void start() {
    if (std::exchange(abandoned_, false) && callbacks_.drain) callbacks_.drain();
    restore_buckets();
    reset();
  }

  void begin() {
    std::lock_guard lock(mutex_);
    start();
    placement_.begin();
  }

  void abandon() {
    std::lock_guard lock(mutex_);
    placement_.end(false);
    abandoned_ = true;
    reset();
  }

  void end() {
    std::lock_guard lock(mutex_);
    at::NoGradGuard no_grad;
    struct Reset {
      Impl& impl;
      ~Reset() { impl.reset(); }
    } reset_at_the_end{*this};
    placement_.end(true);
    if (sync_) finish_all();
  }

  /// The gradient that autograd left in `.grad` goes to its place in the bucket.
  void take(size_t i, const at::Tensor& computed) {
    auto& grad = parameters_[i].tensor.mutable_grad();
    if (!grad.defined()) return;
    check_gradient(options_.component, parameters_[i].name, grad, group_.rank());
    if (!options_.gradient_as_bucket_view) {
      if (sync_) place(grad, view(i));
      return;
    }
    if (same_memory(grad, view(i))) {
      if (holds_foreign_tensor(i) && !held_by_autograd(grad, computed))
        reallocate_bucket(where_[i].bucket);
      else released_by_autograd_[i] = true;
    } else {
      place(grad, writable_view(i));
    }
    grad = view(i);
  }

  void complete(size_t i) {
    --pending_[where_[i].bucket];
    auto& lane = lanes_[buckets_[where_[i].bucket].lane];
    while (lane.next < lane.buckets.size() && pending_[lane.buckets[lane.next]] == 0)
      ready(lane.buckets[lane.next++]);
  }

  void ready(size_t b) {
    const auto& members = buckets_[b].members;
    if (std::any_of(members.begin(), members.end(),
                    [&](size_t i) { return holds_foreign_tensor(i); }))
      reallocate_bucket(b);
    callbacks_.ready(b);
  }

  /// Somebody else has a tensor in the parameter's window (see gradient_placement.h).
  bool holds_foreign_tensor(size_t i) const {
    return !released_by_autograd_[i] && !displaced_.contains(where_[i].bucket) &&
           placement_.occupied(i);
  }

  /// The parameter's window, to be written to.
  const at::Tensor& writable_view(size_t i) {
    if (holds_foreign_tensor(i)) reallocate_bucket(where_[i].bucket);
    return view(i);
  }

  /// Leaves a bucket's memory to the tensors that others have in it, and goes on in memory of its
  /// own: slower for collectives, and the same to them otherwise.
  void reallocate_bucket(size_t b) {
    placement_.end(false);  // this backward is not like the last one
    auto& bucket = buckets_[b];
    // Zeros: what counts as zero may have been zeroed before.
    auto own = make_bucket(bucket.members, bucket.layout, at::zeros_like(bucket.flat), tensors());
    own.lane = bucket.lane;
    std::vector<size_t> taken;
    std::copy_if(bucket.members.begin(), bucket.members.end(), std::back_inserter(taken),
                 [&](size_t i) { return holds_foreign_tensor(i); });
    placement_.exclude(taken);
    for (size_t m = 0; m < bucket.members.size(); ++m) {
      const auto i = bucket.members[m];
      auto& grad = parameters_[i].tensor.mutable_grad();
      if (!grad.defined() || !same_memory(grad, bucket.views[m])) continue;
      own.views[m].copy_(grad);
      grad = own.views[m];
    }
    displaced_.emplace(b, std::exchange(bucket, std::move(own)));
  }

  /// Between backwards: the buckets whose memory is free again.
  void restore_buckets() {
    std::fill(released_by_autograd_.begin(), released_by_autograd_.end(), 0);
    std::erase_if(displaced_, [&](auto& entry) {
      auto& [b, home] = entry;
      for (size_t m = 0; m < home.members.size(); ++m) {
        const auto& grad = parameters_[home.members[m]].tensor.grad();
        if (placement_.occupied(home.members[m]) ||
            (grad.defined() && same_memory(grad, buckets_[b].views[m])))
          return false;
      }
      buckets_[b] = std::move(home);
      return true;
    });
  }

  /// What is still open at the end: parameters without a gradient, then the buckets that waited for
  /// them.
  void finish_all() {
    std::vector<std::string> missing;
    std::vector<char> have(parameters_.size(), 1);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (arrivals_[i] > 0) continue;
      auto& grad = parameters_[i].tensor.mutable_grad();
      have[i] = grad.defined();
      missing_[i] = !have[i];
      if (have[i]) {
        take_unsent(i);
      } else {
        missing.push_back(parameters_[i].name);
        if (may_be_unused() || shadowing_) writable_view(i).zero_();
      }
    }
    if (!missing.empty() && !may_be_unused() && !shadowing_) {
      group_.fail(fmt::format(
          "{}: rank {}: backward left {} without a gradient: {}; set find_unused_parameters, or "
          "use every parameter in the loss",
          options_.component, group_.rank(),
          missing.size() == 1 ? "a parameter" : fmt::format("{} parameters", missing.size()),
          fmt::join(missing.begin(), missing.begin() + std::min<size_t>(missing.size(), 10),
                    ", ")));
    }
    for (auto& lane : lanes_) {
      while (lane.next < lane.buckets.size()) ready(lane.buckets[lane.next++]);
    }
    if (options_.static_graph && expected_.empty() && !shadowing_)
      expected_.assign(arrivals_.begin(), arrivals_.end());
    exchange_use(have);
    last_order_ = order_;
    callbacks_.finish();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (used_[i]) give_back(i);
    }
  }

  bool may_be_unused() const { return options_.find_unused_parameters || options_.static_graph; }

  /// A gradient from an earlier backward under no_sync that this one did not touch.
  void take_unsent(size_t i) {
    auto& grad = parameters_[i].tensor.mutable_grad();
    if (same_memory(grad, view(i))) return;
    place(grad, writable_view(i));
    if (options_.gradient_as_bucket_view) grad = view(i);
  }

  void exchange_use(const std::vector<char>& have) {
    used_.assign(parameters_.size(), 1);
    if (options_.caller_tracks_use) used_ = have;
    if (!may_be_unused() || options_.caller_tracks_use) return;
    if (options_.static_graph && !static_used_.empty()) {
      used_ = static_used_;
      return;
    }
    auto counts = at::empty({static_cast<int64_t>(have.size())},
                            at::TensorOptions().dtype(at::kInt).device(group_.control_device()));
    const auto local = at::tensor(std::vector<int>(have.begin(), have.end()), at::kInt);
    counts.copy_(local);
    group_.all_reduce(counts);
    const auto host = counts.cpu();
    std::transform(host.data_ptr<int>(), host.data_ptr<int>() + have.size(), used_.begin(),
                   [](int ranks) { return ranks > 0; });
    static_used_ = used_;
  }

  void give_back(size_t i) {
    auto& grad = parameters_[i].tensor.mutable_grad();
    if (options_.gradient_as_bucket_view) {
      grad = view(i);
    } else {
      if (!grad.defined()) grad = at::empty_like(view(i));
      grad.copy_(view(i));
    }
  }

  ProcessGroup group_;
  std::vector<NamedTensor> parameters_;
  ReducerOptions options_;
  Callbacks callbacks_;

  std::recursive_mutex mutex_;  // `ready` and `finish` may come back, through buckets()
  std::vector<Place> where_;
  std::vector<int> arrivals_;
  std::vector<int> expected_;  // static_graph: arrivals in the first backward
  std::vector<char> static_used_;
  std::vector<size_t> last_order_;
  std::vector<int64_t> pending_;
  std::vector<Lane> lanes_;
  GradientPlacement placement_;
  std::map<size_t, Bucket> displaced_;  // buckets as they were before they moved out
  std::vector<char>
      released_by_autograd_;  // windows that nobody but autograd holds, until the hook returns
  bool shadowing_ = false;
  bool abandoned_ = false;  // the last backward threw
  std::unique_ptr<BackwardWatch> watch_;
};

Reducer::Reducer(ProcessGroup group, std::vector<NamedTensor> parameters,
                 std::vector<Bucket> buckets, ReducerOptions options, Callbacks callbacks)
    : impl_(std::make_unique<Impl>(std::move(group), std::move(parameters), std::move(options),
                                   std::move(callbacks))) {
  impl_->set_buckets(std::move(buckets));
  impl_->attach();
}

Reducer::~Reducer() = default;

void Reducer::set_sync(bool sync) { impl_->sync_ = sync; }
bool Reducer::sync() const { return impl_->sync_; }
void Reducer::flush() { impl_->flush(); }
void Reducer::shadow() { impl_->shadow(); }
void Reducer::replace_buckets(std::vector<Bucket> buckets) {
  impl_->set_buckets(std::move(buckets));
}
const std::vector<Bucket>& Reducer::buckets() const { return impl_->buckets_; }
std::vector<size_t> Reducer::arrival_order() const { return impl_->arrival_order(); }
const std::vector<size_t>& Reducer::arrived() const { return impl_->order_; }
void Reducer::set_used(size_t parameter) { impl_->used_[parameter] = true; }
bool Reducer::used(size_t parameter) const {
  return impl_->used_.empty() || impl_->used_[parameter];
}
bool Reducer::has_gradient(size_t parameter) const { return !impl_->missing_[parameter]; }
uint64_t Reducer::generation() const { return impl_->generation_; }
void Reducer::zero_grad(bool set_to_none) { impl_->zero_grad(set_to_none); }

}  // namespace tessera::sharding
