#include "tessera/distributed_data_parallel.h"

#include <algorithm>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "comm/base/local_work.h"
#include "comm/group/tag_scope.h"
#include "ddp/background_updates.h"
#include "ddp/bucket_cap.h"
#include "ddp/bucket_order.h"
#include "sharding/bucket_plan.h"
#include "sharding/detection/detection.h"
#include "sharding/gradients/forward_writes.h"
#include "sharding/gradients/gradient_wire.h"
#include "sharding/gradients/reducer.h"
#include "sharding/module_buffers.h"
#include "sharding/shared/shared_parameters.h"
#include "sharding/wrapped_parameters.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

constexpr const char* kDdpName = "DistributedDataParallel";
constexpr double kMiB = 1 << 20;

using sharding::Bucket;
using sharding::Layout;
using sharding::NamedTensor;

void check_options(const DistributedDataParallelOptions& options, int rank) {
  const auto positive = [&](const char* name, double value) {
    if (!(value > 0))
      throw UsageError(
          fmt::format("{}: rank {}: option {} is {}; expected a positive number of MiB", kDdpName,
                      rank, name, value));
  };
  positive("first_bucket_mb", options.first_bucket_mb);
  positive("bucket_cap_mb", options.bucket_cap_mb.value_or(kDefaultBucketMib));
  sharding::refuse_parameter_wire(kDdpName, rank, options.wire);
  if (options.comm_hook && options.wire.gradients != WireFormat::float32) {
    throw UsageError(fmt::format(
        "{}: rank {}: option wire.gradients is {}, and option comm_hook replaces the reduction; "
        "expected one of the two",
        kDdpName, rank, to_string(options.wire.gradients)));
  }
}

}  // namespace

class DistributedDataParallelBase::Impl : private sharding::ReductionPolicy {
 public:
  Impl(torch::nn::Module& module, ProcessGroup group, DistributedDataParallelOptions options)
      : module_(module),
        group_(std::move(group)),
        options_(std::move(options)),
        buffers_(module, options_.buffers),
        divisor_(group_.size()) {
    agree(group_, [&] {
      check_options(options_, group_.rank());
      collect_parameters();
      check_sharing();
      wrapped_ = sharding::WrappedParameters(kDdpName, group_.rank(),
                                             sharding::Use::reduces_in_backward, all_);
      sharding::Page::check_orphan_writes(all_);
    });
    in_background_ =
        overlaps_in_background() &&
        sharding::start_detection_for(kDdpName, group_.rank(), "gradients", "overlap background");
    auto contract = sharding::signatures(all_);
    for (auto& line : buffers_.signatures()) contract.push_back(std::move(line));
    contract.push_back(
        fmt::format("options: buckets {} and {} MiB, find_unused_parameters {}, static_graph {}, "
                    "wire: {}{}, overlap {}{}",
                    options_.first_bucket_mb, options_.bucket_cap_mb.value_or(0),
                    options_.find_unused_parameters, options_.static_graph,
                    to_string(options_.wire), options_.share_parameters ? ", share_parameters" : "",
                    static_cast<int>(options_.overlap), in_background_ ? " in fact" : ""));
    group_.check_contract(kDdpName, contract);
    bucket_cap_mib_ = bucket_cap();
    if (options_.share_parameters) share_frozen();
    comm::run_local_work(group_, kDdpName, [&] { materialize(module_); });
    wire_.emplace(lanes());
    broadcast_model(0);
    forward_writes_ = sharding::ForwardWrites(trainable_);
    // Backward produces gradients about in reverse order.
    std::vector<size_t> reverse_order(trainable_.size());
    for (size_t i = 0; i < reverse_order.size(); ++i)
      reverse_order[i] = reverse_order.size() - 1 - i;
    sharding::ReducerOptions reducing;
    reducing.component = kDdpName;
    reducing.find_unused_parameters = options_.find_unused_parameters;
    reducing.static_graph = options_.static_graph;
    reducing.offers_static_graph = true;
    reducing.in_background = in_background_;
    sharding::ReductionPolicy* const policy = this;
    reducer_ = std::make_unique<sharding::Reducer>(group_, trainable_, make_buckets(reverse_order),
                                                   reducing, policy);
    if (in_background_) updates_.emplace(trainable_, *reducer_->arriving());
  }

  void before_forward() {
    reducer_->check_attached();
    if (!reducer_->sync() || !at::GradMode::is_enabled()) return;
    forward_writes_.begin();
    if (!module_.is_training()) return;
    check_trainability();
    begin_pass();
  }

  void on_join_iteration(const JoinIteration& iteration) {
    divisor_ = iteration.divisor;
    publisher_ = iteration.first_active;
    forward_writes_.pause(iteration.active_ranks < group_.size());
    buffers_.set_active(iteration.first_active, iteration.active_ranks);
  }

  void shadow_backward() {
    has_data_ = false;
    const auto reset = c10::make_scope_exit([this] { has_data_ = true; });
    if (module_.is_training()) begin_pass();
    reducer_->shadow();
  }

  void finish_join(int last_active_rank) { broadcast_model(last_active_rank); }

  void with_shared_write(const std::function<void()>& write) {
    if (!shared_) {
      return agree(group_, [&] {
        const at::NoGradGuard no_grad;
        write();
      });
    }
    shared_->write(write);
    for (const auto& [name, tensor] : frozen_) tensor.unsafeGetTensorImpl()->bump_version();
    if (shared_->any()) broadcast_model(0);
  }

  int64_t parameter_bytes() const {
    int64_t bytes = shares() ? shared_->own_bytes() : 0;
    for (const auto& [name, tensor] : shares() ? trainable_ : all_)
      bytes += static_cast<int64_t>(tensor.nbytes());
    return bytes;
  }

  void wait() {
    wait_for_buckets();
    reducer_->wait_for_arrivals();
    if (std::exchange(uncommitted_, false)) wire_->commit();
  }

  void end_step(StepEnd end) {
    sharding::check_scale_change(kDdpName, group_.rank(), end.scale);
    wait();
    wire_->end_step(end.used);
    wire_->rescale(end.scale);
  }

  const ProcessGroup& group() const { return group_; }
  sharding::Reducer& reducer() { return *reducer_; }

 private:
  /// Of the buckets' reductions.
  enum class Order { of_parameters, of_arrival, last };

  void collect_parameters() {
    auto& ignored = options_.parameters_to_ignore;
    std::set<std::string> unknown(ignored.begin(), ignored.end());
    std::vector<std::string> names;
    for (const auto& [name, tensor] : named_parameters(module_)) {
      names.push_back(name);
      unknown.erase(name);
      if (std::find(ignored.begin(), ignored.end(), name) == ignored.end())
        all_.push_back({name, tensor});
    }
    if (!unknown.empty()) {
      throw UsageError(fmt::format(
          "{}: rank {}: option parameters_to_ignore names {}, and the module has no such "
          "parameter{}",
          kDdpName, group_.rank(), *unknown.begin(), did_you_mean(*unknown.begin(), names)));
    }
    sharding::check_parameters(kDdpName, all_, 0, group_.rank());
    std::partition_copy(all_.begin(), all_.end(), std::back_inserter(trainable_),
                        std::back_inserter(frozen_),
                        [](const auto& p) { return p.tensor.requires_grad(); });
    sharding::check_wire_dtypes(kDdpName, group_.rank(), options_.wire, trainable_);
    if (trainable_.empty())
      throw UsageError(
          fmt::format("{}: rank {}: no parameter requires a gradient; expected at least one",
                      kDdpName, group_.rank()));
  }

  bool shares() const { return shared_ && shared_->any(); }

  void check_sharing() const {
    if (!options_.share_parameters) return;
    const auto refuse = [&](const std::string& reason) {
      throw UsageError(
          fmt::format("{}: rank {}: option share_parameters {}", kDdpName, group_.rank(), reason));
    };
    for (const auto& [name, tensor] : frozen_) {
      if (!tensor.device().is_cpu())
        refuse(fmt::format("needs frozen parameters on the CPU, and {} is on {}", name,
                           tensor.device().str()));
    }
    if (group_.size() > 1) {
      sharding::require_detection(
          fmt::format("{}: rank {}: option share_parameters", kDdpName, group_.rank()),
          "the option off");
    }
  }

  /// A hook's collectives, and those of a device, end within backward.
  bool overlaps_in_background() const {
    return options_.overlap == Overlap::background && group_.size() > 1 && !options_.comm_hook &&
           std::all_of(trainable_.begin(), trainable_.end(),
                       [](const auto& parameter) { return parameter.tensor.device().is_cpu(); });
  }

  /// [Note: one copy a host]
  void share_frozen() {
    shared_ = std::make_unique<sharding::SharedParameters>(
        group_, fmt::format("{}: rank {}", kDdpName, group_.rank()),
        "ddp.with_shared_write([&] { … }), or trainable parameters before construction", true);
    std::vector<size_t> members(frozen_.size());
    for (size_t i = 0; i < members.size(); ++i) members[i] = i;
    shared_->place_whole(frozen_, members);
  }

  /// A parameter that was frozen has no bucket: its gradient would stay this rank's own.
  void check_trainability() {
    for (const auto& [name, tensor] : frozen_) {
      if (tensor.requires_grad()) group_.fail(sharding::thawed_text(kDdpName, name, group_.rank()));
    }
  }

  /// A module that was put in the place of another one has parameters without a bucket.
  void check_same_parameters() {
    std::unordered_set<const void*> known;
    for (const auto& [name, tensor] : all_) known.insert(tensor.unsafeGetTensorImpl());
    const auto& ignored = options_.parameters_to_ignore;
    for (const auto& [name, tensor] : named_parameters(module_)) {
      if (known.contains(tensor.unsafeGetTensorImpl()) ||
          std::find(ignored.begin(), ignored.end(), name) != ignored.end())
        continue;
      group_.fail(fmt::format(
          "{}: rank {}: parameter {} was not in the module at construction (replace_module()?), so "
          "its gradient is not reduced; expected the {} to be constructed after such changes",
          kDdpName, group_.rank(), name, kDdpName));
    }
  }

  double bucket_cap() {
    if (options_.bucket_cap_mb) return *options_.bucket_cap_mb;
    // A hook's results and rounded values may depend on the size, so it must not vary.
    if (options_.comm_hook || options_.wire.gradients != WireFormat::float32)
      return kDefaultBucketMib;
    return choose_bucket_mib(group_);
  }

  sharding::Lanes lanes() const {
    const auto format = options_.wire.gradients;
    const size_t count = options_.comm_hook ? 1 : sharding::lanes_between_hosts(group_);
    if (in_background_) return sharding::Lanes::with_first_apart(group_, format, count + 1);
    return {group_, format, count};
  }

  void broadcast_model(int root) {
    std::vector<at::Tensor> tensors;
    // Shared ones are rank 0's since they were placed.
    for (const auto& parameter : shares() ? trainable_ : all_) tensors.push_back(parameter.tensor);
    group_.broadcast(tensors, root);
    buffers_.broadcast(group_, root);
  }

  /// A forward pass that a synchronising backward will follow.
  void begin_pass() {
    buffers_.synchronize(group_, has_data_);
    ++forwards_;
  }

  /// Buckets of the trainable parameters, filled in the given order, in which the gradients are
  /// expected to arrive.
  std::vector<Bucket> make_buckets(const std::vector<size_t>& order) {
    std::vector<at::Tensor> tensors;
    for (const auto& parameter : trainable_) tensors.push_back(parameter.tensor);
    const auto first = static_cast<int64_t>(options_.first_bucket_mb * kMiB),
               cap = static_cast<int64_t>(bucket_cap_mib_ * kMiB);
    auto plan = sharding::plan_buckets(tensors, order, first, cap);
    std::vector<Bucket> buckets;
    for (const auto b : order_of_reductions(plan.size(), share_in_backward_)) {
      auto& members = plan[b];
      std::vector<int64_t> sizes;
      for (const auto i : members) sizes.push_back(tensors[i].numel());
      auto layout = Layout::flat(std::move(sizes), group_.size());
      auto group = wire_->group(buckets.size());
      auto flat =
          group.allocate(layout.numel(), tensors[members[0]].options().requires_grad(false));
      buckets.push_back(
          sharding::make_bucket(std::move(members), std::move(layout), std::move(flat), tensors));
    }
    return buckets;
  }

  void start(size_t index) override {
    if (options_.overlap == Overlap::none) complete_.push_back(index);
    else reduce_bucket(index);
  }

  void reduce_bucket(size_t index) {
    forward_writes_.compare(kDdpName, group_);
    times_.begin(index);
    const auto& bucket = reducer_->buckets()[index];
    if (!options_.comm_hook) {
      const auto feedback = wire_->scope(index);
      auto group = wire_->group(index);
      auto work = group.all_reduce_async(bucket.flat, 1.0 / divisor_, tag(index));
      if (in_background_) reducing_.emplace_back(index, std::move(work));
      else waiting_.push_back([work = std::move(work)]() mutable { work.wait(); });
      return;
    }
    GradientBucket gradients{index, bucket.flat, {}, bucket.views};
    for (const auto i : bucket.members) gradients.names.push_back(trainable_[i].name);
    // The collectives of a hook are its own, in both of its parts.
    const comm::TagScope start(tag(index));
    waiting_.push_back([wait = options_.comm_hook(group_, gradients), tag = tag(index)] {
      const comm::TagScope end(tag);
      wait();
    });
    // A hook averages over all ranks; a join may divide by another number.
    if (divisor_ == group_.size()) return;
    waiting_.push_back([flat = bucket.flat, scale = static_cast<double>(group_.size()) / divisor_] {
      flat.mul_(scale);
    });
  }

  void finish() override {
    if (reducer_->arrived().size() < trainable_.size()) check_same_parameters();
    for (const auto index : std::exchange(complete_, {})) reduce_bucket(index);
    for (auto& [bucket, work] : std::exchange(reducing_, {}))
      reducer_->arrives_with(bucket, std::move(work));
    wait_for_buckets();
  }

  void abandon() override {
    complete_.clear();
    wait();
  }

  void wait_for_buckets() {
    auto reducing = std::exchange(reducing_, {});
    for (auto& [bucket, work] : reducing) work.wait();
    auto waiting = std::exchange(waiting_, {});
    for (auto& wait : waiting) wait();
  }

  /// Ranks that have made different numbers of passes reduce gradients of different steps: the tags
  /// of the reductions then differ, which is an error on every rank.
  std::string tag(size_t bucket) const {
    return fmt::format("bucket {} of backward {}, after {} forward passes: {}", bucket,
                       backwards_ + 1, forwards_,
                       first_to_last(trainable_, reducer_->buckets()[bucket].members));
  }

  /// All ranks are at the end of the same synchronising backward.
  void finished() override {
    ++backwards_;
    uncommitted_ = true;
    if (!in_background_ || order_ != Order::last) wait();
    const double share = times_.share_in_backward();
    if (module_.is_training()) buffers_.synchronize(group_, has_data_);
    if (order_ == Order::of_parameters) order_by_arrival();
    else if (order_ == Order::of_arrival) order_for_next_forward(share);
  }

  /// After the first backward pass: the order in which the gradients of rank 0 (during a join, of
  /// an active rank) arrived. Collective.
  void order_by_arrival() {
    std::string mine;
    for (const auto i : reducer_->arrival_order()) mine += std::to_string(i) + " ";
    const auto theirs = group_.broadcast_bytes(mine, publisher_);
    arrival_order_.clear();
    for (size_t at = 0; at < theirs.size(); at = theirs.find(' ', at) + 1)
      arrival_order_.push_back(std::stoul(theirs.substr(at)));
    wire_->reset();
    reducer_->replace_buckets(make_buckets(arrival_order_));
    // The rounding of a bucket must not depend on measured times.
    const bool exact = options_.wire.gradients == WireFormat::float32;
    order_ = in_background_ && exact ? Order::of_arrival : Order::last;
  }

  /// After the second one: [Note: order of reductions], by the times of the same rank, if it steps
  /// in the background. Collective.
  void order_for_next_forward(double share) {
    order_ = Order::last;
    // One bucket more than the share, because a wire that waits costs more than a late bucket.
    const double mine = share + 1.0 / static_cast<double>(reducer_->buckets().size());
    const int permille =
        updates_ && updates_->used() ? std::max(1, static_cast<int>(1000 * mine)) : 1000;
    share_in_backward_ =
        std::stoi(group_.broadcast_bytes(std::to_string(permille), publisher_)) / 1000.0;
    if (share_in_backward_ >= 1) return;
    reducer_->replace_buckets(make_buckets(arrival_order_));
  }

  torch::nn::Module& module_;
  ProcessGroup group_;
  DistributedDataParallelOptions options_;
  std::optional<sharding::GradientWire> wire_;
  std::vector<NamedTensor> all_, trainable_, frozen_;  // frozen at construction
  sharding::WrappedParameters wrapped_;
  std::unique_ptr<sharding::SharedParameters> shared_;  // null without share_parameters
  sharding::ModuleBuffers buffers_;
  sharding::ForwardWrites forward_writes_;
  bool has_data_ = true;  // false while this rank takes part in a join without data
  uint64_t forwards_ = 0, backwards_ = 0;  // that synchronise, since construction
  std::vector<std::function<void()>> waiting_;
  std::vector<size_t> complete_;                   // buckets, with Overlap::none
  bool in_background_ = false;                     // Overlap::background, where it is possible
  std::vector<std::pair<size_t, Work>> reducing_;  // buckets of this backward, with it
  bool uncommitted_ = false;                       // wire_ has reductions of the last backward
  double bucket_cap_mib_ = kDefaultBucketMib;
  Order order_ = Order::of_parameters;
  std::vector<size_t> arrival_order_;
  double share_in_backward_ = 1;  // see order_of_reductions()
  ReductionTimes times_;
  int divisor_ = 1;
  int publisher_ = 0;  // the rank whose order of arrival is used
  std::unique_ptr<sharding::Reducer> reducer_;
  std::optional<BackgroundUpdates> updates_;  // with in_background_
};

DistributedDataParallelBase::DistributedDataParallelBase(torch::nn::Module& module,
                                                         ProcessGroup group, Options options)
    : impl_(std::make_unique<Impl>(module, std::move(group), std::move(options))) {}
DistributedDataParallelBase::~DistributedDataParallelBase() = default;
DistributedDataParallelBase::DistributedDataParallelBase(DistributedDataParallelBase&&) noexcept =
    default;

void DistributedDataParallelBase::before_forward() { impl_->before_forward(); }
NoSync DistributedDataParallelBase::no_sync() {
  return NoSync([impl = impl_.get()](int change) { impl->reducer().hold_sync(change); });
}
void DistributedDataParallelBase::wait() { impl_->wait(); }
void DistributedDataParallelBase::end_step(StepEnd end) { impl_->end_step(end); }
void DistributedDataParallelBase::with_shared_write(const std::function<void()>& write) {
  impl_->with_shared_write(write);
}
int64_t DistributedDataParallelBase::parameter_bytes() const { return impl_->parameter_bytes(); }
size_t DistributedDataParallelBase::buckets() const { return impl_->reducer().buckets().size(); }

int64_t DistributedDataParallelBase::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : impl_->reducer().buckets()) bytes += bucket.bytes();
  return bytes;
}

void DistributedDataParallelBase::shadow_backward() { impl_->shadow_backward(); }
void DistributedDataParallelBase::shadow_step() { impl_->shadow_backward(); }
ProcessGroup DistributedDataParallelBase::join_group() const { return impl_->group(); }
void DistributedDataParallelBase::on_join_iteration(const JoinIteration& iteration) {
  impl_->on_join_iteration(iteration);
}
void DistributedDataParallelBase::finish_join(int last_active_rank) {
  impl_->finish_join(last_active_rank);
}

}  // namespace tessera
