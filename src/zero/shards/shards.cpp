#include "zero/shards/shards.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/base/local_work.h"
#include "sharding/shard_state.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"

namespace tessera::zero {
namespace {

constexpr int64_t kEarlyBucket = 8 << 20;  // bytes; [Note: reduction within backward]

ShardPlan plan_of(const ZeroRedundancyOptimizerOptions& options) {
  ShardPlan plan;
  plan.partition = options.partition;
  plan.as_bucket_view = options.parameters_as_bucket_view;
  plan.with_gradients = options.reduce_gradients;
  plan.lean_gradients = options.shard_gradients;
  if (options.shard_gradients)
    plan.cap_bytes = static_cast<int64_t>(options.bucket_cap_mb * (1 << 20));
  return plan;
}

}  // namespace

Shards::Shards(ProcessGroup group, const ZeroRedundancyOptimizerOptions& options, Ways ways,
               const sharding::GradientWire& gradients, const std::string& prefix)
    : group_(std::move(group)),
      gradients_(gradients),
      plan_(plan_of(options)),
      early_(ways.early),
      cap_bytes_(static_cast<int64_t>(options.bucket_cap_mb * (1 << 20))),
      load_(group_.size(), 0) {
  plan_.one_owner = ways.one_owner;
  if (auto encoded = group_.with_wire(options.wire.parameters); encoded.impl() != group_.impl())
    wire_.emplace(std::move(encoded));
  if (options.share_parameters) {
    shared_ = std::make_unique<sharding::SharedParameters>(
        group_, prefix, "optimizer.with_shared_write([&] { … })", options.broadcast_parameters);
    plan_.shared = shared_.get();
  }
  if (!ways.in_background) return;
  arriving_ = std::make_unique<sharding::ArrivingPages>();
  if (options.wire.gradients != WireFormat::float32 && !group_.same_host())
    background_ = group_.duplicate();
}

Shards::~Shards() {
  if (arriving_) arriving_->release();
}

void Shards::add_group(size_t index, std::vector<sharding::NamedTensor> parameters) {
  sharding::check_parameters(kName, parameters, index, group_.rank());
  const auto refuse = [&](size_t i, const std::string& problem) {
    throw UsageError(fmt::format("{}: group {}, parameter {} ({}): {}", kName, index, i,
                                 parameters[i].name, problem));
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (const auto& known : parameters_)
      if (known.tensor.is_same(parameters[i].tensor) || known.name == parameters[i].name)
        refuse(i, fmt::format("already in an earlier group as {}", known.name));
    if (!plan_.as_bucket_view && !parameters[i].tensor.is_non_overlapping_and_dense())
      refuse(i, "its elements are not densely stored, which needs parameters_as_bucket_view");
  }
  for (auto& parameter : parameters) {
    // Others are computed when they move into their bucket or into shared memory.
    if (!shared_ && (!plan_.as_bucket_view || !parameter.tensor.requires_grad()))
      comm::run_local_work(group_, kName, [&] { materialize(parameter.tensor); });
    parameters_.push_back(std::move(parameter));
    group_of_.push_back(index);
  }
}

void Shards::keep_storage(size_t i) {
  keeps_storage_.insert(i);
  comm::run_local_work(group_, kName, [&] { materialize(parameters_[i].tensor); });
}

void Shards::place_new() {
  std::vector<size_t> fresh, frozen;
  for (size_t i = placed(); i < parameters_.size(); ++i) {
    in_bucket_.push_back(parameters_[i].tensor.requires_grad());
    (in_bucket_[i] ? fresh : frozen).push_back(i);
  }
  note_trainability();
  place(fresh);
  if (shared_) shared_->place_whole(parameters_, frozen);
}

void Shards::place_thawed(const std::vector<size_t>& thawed) {
  for (const auto i : thawed) in_bucket_[i] = true;
  place(thawed);
}

void Shards::place(const std::vector<size_t>& subset) {
  std::vector<size_t> move, stay;
  for (const auto i : subset) (keeps_storage_.contains(i) ? stay : move).push_back(i);
  place(move, plan_);
  auto in_own_storage = plan_;
  in_own_storage.as_bucket_view = false;
  place(stay, in_own_storage);
}

void Shards::place(const std::vector<size_t>& subset, ShardPlan plan) {
  if (subset.empty()) return;
  // libtorch's 16-bit kernels round differently at the ends of tensors, so a cut would change
  // results.
  if (early_ && std::all_of(subset.begin(), subset.end(),
                            [this](size_t i) { return parameters_[i].tensor.element_size() >= 4; }))
    plan.cap_bytes = std::min(kEarlyBucket, cap_bytes_);
  auto buckets = make_shard_buckets(parameters_, subset, group_of_, plan, load_, group_);
  for (size_t b = 0; arriving_ && plan.as_bucket_view && b < buckets.size(); ++b) {
    put_on_page(buckets[b], parameters_, arriving_->make_page(buckets[b].parameters),
                plan_.partition != Partition::flat);
  }
  for (auto& bucket : buckets) buckets_.push_back(std::move(bucket));
  for (const auto i : subset) data_of_[i] = parameters_[i].tensor.data_ptr();
}

std::vector<size_t> Shards::all_in_buckets() const {
  std::vector<size_t> subset;
  for (size_t i = 0; i < placed(); ++i)
    if (in_bucket_[i]) subset.push_back(i);
  return subset;
}

std::vector<std::string> Shards::changed_trainability() const {
  std::vector<std::string> changed;
  for (size_t i = 0; i < placed(); ++i)
    if (parameters_[i].tensor.requires_grad() != static_cast<bool>(trainable_[i]))
      changed.push_back(parameters_[i].name);
  return changed;
}

void Shards::note_trainability() {
  trainable_.resize(placed());
  for (size_t i = 0; i < placed(); ++i) trainable_[i] = parameters_[i].tensor.requires_grad();
}

std::vector<size_t> Shards::thawed() const {
  std::vector<size_t> thawed;
  for (size_t i = 0; i < placed(); ++i)
    if (!in_bucket_[i] && parameters_[i].tensor.requires_grad()) thawed.push_back(i);
  return thawed;
}

std::string Shards::moved_parameter() const {
  for (const auto& [parameter, data] : data_of_)
    if (parameters_[parameter].tensor.data_ptr() != data) return parameters_[parameter].name;
  return "";
}

std::vector<const sharding::OwnedShard*> Shards::owned() const {
  std::vector<const sharding::OwnedShard*> shards;
  for (const auto& bucket : buckets_)
    for (const auto& shard : bucket.shards) shards.push_back(&shard);
  return shards;
}

void Shards::restore() {
  for (size_t b = 0; wire_ && b < buckets_.size(); ++b) wire_->restore(b, buckets_[b]);
}

void Shards::gather_exact() {
  wait_for_gathers();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    gather_parameters(buckets_[b], parameters_, gather_group(b));
    bump_versions(buckets_[b]);
  }
  if (wire_) wire_->reset();
}

void Shards::add_residuals(std::vector<StateSlice>& slices) const {
  for (size_t b = 0; wire_ && b < buckets_.size(); ++b) {
    const auto lacking = wire_->residual(b);
    if (!lacking.defined()) continue;
    for (const auto& shard : buckets_[b].shards) {
      const auto& name = parameters_[shard.parameter].name;
      for (auto& slice : slices)
        if (slice.parameter == name && slice.begin == shard.begin)
          slice.state.tensors[sharding::kWireResidual] = lacking.narrow(0, shard.at, shard.numel);
    }
  }
}

void Shards::take_residuals(const std::vector<StateSlice>& slices, bool all) {
  if (!wire_) return;
  if (all) wire_->reset();
  at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    auto lacking = wire_->residual(b);
    if (!lacking.defined())
      lacking =
          at::zeros({buckets_[b].layout.counts()[group_.rank()]}, buckets_[b].parameters.options());
    for (const auto& shard : buckets_[b].shards) {
      const auto& name = parameters_[shard.parameter].name;
      for (const auto& slice : slices) {
        const auto found = slice.state.tensors.find(sharding::kWireResidual);
        if (slice.parameter != name || slice.begin > shard.begin ||
            slice.begin + slice.numel < shard.begin + shard.numel ||
            found == slice.state.tensors.end())
          continue;
        lacking.narrow(0, shard.at, shard.numel)
            .copy_(found->second.reshape({-1}).narrow(0, shard.begin - slice.begin, shard.numel));
      }
    }
    wire_->set_residual(b, std::move(lacking));
  }
}

void Shards::gather(const std::string& tag, bool paged) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (buckets_[b].page && !paged) continue;
    if (wire_) {
      if (!wire_->has_begun(b)) wire_->begin(b, buckets_[b], gather_tag(buckets_[b], tag));
      continue;
    }
    const auto begun = gathers_.extract(b);
    if (begun) begun.mapped().wait();
    else gather_parameters(buckets_[b], parameters_, gather_group(b), tag);
  }
  if (wire_) wire_->finish(buckets_, shares() ? shared() : nullptr);
  bump_versions();
}

void Shards::begin_gather(size_t b, const std::string& tag) {
  const auto& bucket = buckets_[b];
  if (!bucket.parameters.defined()) return;
  if (wire_) return wire_->begin(b, bucket, gather_tag(bucket, tag));
  gathers_[b] = start_gather(b, tag);
}

void Shards::gather_in_background(const std::string& tag) {
  // Buckets are in the order of backward.
  for (size_t b = buckets_.size(); b-- > 0;) {
    if (!buckets_[b].page) continue;
    arriving_->begin(*buckets_[b].page, buckets_[b].parameters, start_gather(b, tag));
    bump_versions(buckets_[b]);
  }
}

void Shards::wait_for_gathers() const {
  if (arriving_) arriving_->wait_all();
}

/// Gathers in the background do not delay the caller's collectives. A bucket's reduction within
/// backward follows its gather on the same group in every step.
ProcessGroup Shards::gather_group(size_t b) const {
  if (!arriving_) return group_;
  return background_ ? *background_ : gradients_.group(b);
}

Work Shards::start_gather(size_t b, const std::string& tag) {
  const auto& bucket = buckets_[b];
  return gather_group(b).all_gather_async(bucket.parameters, bucket.layout.counts(),
                                          gather_tag(bucket, tag));
}

void Shards::bump_versions() {
  for (const auto& bucket : buckets_) bump_versions(bucket);
}

void Shards::bump_versions(const ShardBucket& bucket) {
  for (const auto i : bucket.members) parameters_[i].tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace tessera::zero
