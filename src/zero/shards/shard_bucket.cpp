#include "zero/shards/shard_bucket.h"

#include <algorithm>
#include <map>

#include "comm/base/local_work.h"
#include "deferred/contents.h"
#include "memory/heap.h"
#include "sharding/bucket_plan.h"
#include "sharding/detection/detection.h"

namespace tessera::zero {
namespace {

using sharding::Layout;
using sharding::NamedTensor;

/// Whole parameters: owners are assigned group by group, over all buckets, so that the total load
/// is balanced.
std::vector<int> owners_of(const std::vector<NamedTensor>& parameters,
                           const std::vector<size_t>& subset, const std::vector<size_t>& group_of,
                           Partition partition, std::vector<int64_t>& load) {
  std::vector<int> owners(parameters.size(), 0);
  std::map<size_t, std::vector<size_t>> groups;
  for (const auto i : subset) groups[group_of[i]].push_back(i);
  for (const auto& [group, members] : groups) {
    std::vector<int64_t> sizes;
    for (const auto i : members) sizes.push_back(parameters[i].tensor.numel());
    const auto assigned = assign_owners(sizes, load, partition);
    for (size_t k = 0; k < members.size(); ++k) owners[members[k]] = assigned[k];
  }
  return owners;
}

void adopt_storage(ShardBucket& bucket, const std::vector<NamedTensor>& parameters,
                   ProcessGroup& group) {
  at::NoGradGuard no_grad;
  const auto& first = parameters[bucket.members[0]].tensor;
  bucket.parameters = group.allocate(bucket.layout.numel(), first.options().requires_grad(false));
  for (size_t m = 0; m < bucket.members.size(); ++m) {
    auto parameter = parameters[bucket.members[m]].tensor;
    auto window = sharding::window(bucket.parameters, bucket.layout.offset(m), parameter);
    comm::run_local_work(group, kName, [&] {
      const deferred::Contents contents(parameter);
      window.copy_(parameter.detach());
    });
    parameter.set_data(window);
  }
}

/// [Note: one copy a host]
void share_storage(ShardBucket& bucket, const std::vector<NamedTensor>& parameters,
                   ProcessGroup& group, sharding::SharedParameters& shared) {
  const auto& first = parameters[bucket.members[0]].tensor;
  auto memory = shared.allocate(bucket.layout.numel(), first.options().requires_grad(false));
  if (!memory.defined()) return adopt_storage(bucket, parameters, group);
  std::vector<int64_t> offsets;
  for (size_t m = 0; m < bucket.members.size(); ++m) offsets.push_back(bucket.layout.offset(m));
  shared.place(memory, parameters, bucket.members, offsets);
  bucket.parameters = std::move(memory);
}

/// The local optimizer's view of a shard. A whole parameter keeps its shape, for optimizers that
/// look at shapes.
at::Tensor alias(const at::Tensor& parameter, int64_t begin, int64_t numel, bool whole) {
  at::AutoDispatchBelowADInplaceOrView no_views;
  if (whole)
    return parameter.as_strided(parameter.sizes(), parameter.strides(), parameter.storage_offset());
  return sharding::window(sharding::in_memory_order(parameter), begin, numel);
}

}  // namespace

std::vector<ShardBucket> make_shard_buckets(const std::vector<NamedTensor>& parameters,
                                            const std::vector<size_t>& subset,
                                            const std::vector<size_t>& group_of,
                                            const ShardPlan& plan, std::vector<int64_t>& load,
                                            ProcessGroup& group) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back(parameter.tensor);
  const bool flat = plan.partition == Partition::flat;
  const auto owners = flat ? std::vector<int>()
                      : plan.one_owner
                          ? std::vector<int>(parameters.size(), 0)
                          : owners_of(parameters, subset, group_of, plan.partition, load);

  auto member_lists = sharding::by_dtype_and_device(parameters, subset);
  if (plan.cap_bytes > 0) {
    // Backward produces gradients from the last parameter to the first.
    const std::vector<size_t> backwards(subset.rbegin(), subset.rend());
    member_lists = sharding::plan_buckets(tensors, backwards, plan.cap_bytes, plan.cap_bytes);
  }
  std::vector<ShardBucket> buckets;
  for (auto& members : member_lists) {
    ShardBucket bucket;
    std::vector<int64_t> sizes;
    std::vector<int> bucket_owners;
    for (const auto i : members) {
      sizes.push_back(tensors[i].numel());
      if (!flat) bucket_owners.push_back(owners[i]);
    }
    bucket.members = members;
    bucket.names = sharding::first_to_last(parameters, members);
    bucket.layout = flat ? Layout::flat(sizes, group.size())
                         : Layout::owned(sizes, bucket_owners, group.size());
    if (plan.shared) share_storage(bucket, parameters, group, *plan.shared);
    else if (plan.as_bucket_view) adopt_storage(bucket, parameters, group);
    for (const auto& shard : bucket.layout.slices(group.rank())) {
      const auto parameter = members[shard.tensor];
      // Shards are written, so they are not views of a page that refuses writes.
      const auto& whole =
          plan.shared ? sharding::window(bucket.parameters, bucket.layout.offset(shard.tensor),
                                         tensors[parameter])
                      : tensors[parameter];
      bucket.shards.push_back({parameter, shard.begin, shard.numel,
                               shard.offset - bucket.layout.segment_begin(group.rank()),
                               alias(whole, shard.begin, shard.numel, !flat)});
    }
    buckets.push_back(std::move(bucket));
  }
  // Gradients are allocated next. The parameters' former storage is returned first; both together
  // would be the peak.
  if (plan.as_bucket_view) memory::return_freed_memory();
  if (!plan.with_gradients) return buckets;
  for (auto& bucket : buckets) {
    auto gradients = group.allocate(bucket.layout.numel(),
                                    tensors[bucket.members[0]].options().requires_grad(false));
    if (plan.lean_gradients) sharding::release_memory(gradients);
    bucket.gradients =
        sharding::make_bucket(bucket.members, bucket.layout, std::move(gradients), tensors);
  }
  return buckets;
}

void put_on_page(ShardBucket& bucket, const std::vector<NamedTensor>& parameters,
                 std::unique_ptr<sharding::Page> page, bool whole) {
  const sharding::NoDetection no_detection;
  for (size_t m = 0; m < bucket.members.size(); ++m) {
    auto parameter = parameters[bucket.members[m]].tensor;
    parameter.set_data(sharding::window(page->flat(), bucket.layout.offset(m), parameter));
  }
  for (auto& shard : bucket.shards) {
    const auto& parameter = parameters[shard.parameter].tensor;
    shard.tensor = alias(parameter, shard.begin, shard.numel, whole);
  }
  bucket.page = std::move(page);
}

std::string gather_tag(const ShardBucket& bucket, const std::string& own_tag) {
  return own_tag + (own_tag.empty() ? "parameters " : "; parameters ") + bucket.names;
}

void gather_parameters(ShardBucket& bucket, const std::vector<NamedTensor>& parameters,
                       ProcessGroup group, const std::string& own_tag) {
  if (group.size() == 1) return;
  const auto tag = gather_tag(bucket, own_tag);
  if (bucket.parameters.defined())
    return group.all_gather(bucket.parameters, bucket.layout.counts(), tag);
  at::NoGradGuard no_grad;
  const auto& first = parameters[bucket.members[0]].tensor;
  auto flat = at::empty({bucket.layout.numel()}, first.options().requires_grad(false));
  for (const auto& shard : bucket.layout.slices(group.rank())) {
    const auto memory =
        sharding::in_memory_order(parameters[bucket.members[shard.tensor]].tensor.detach());
    flat.narrow(0, shard.offset, shard.numel).copy_(memory.narrow(0, shard.begin, shard.numel));
  }
  group.all_gather(flat, bucket.layout.counts(), tag);
  for (size_t m = 0; m < bucket.members.size(); ++m) {
    auto parameter = parameters[bucket.members[m]].tensor.detach();
    parameter.copy_(sharding::window(flat, bucket.layout.offset(m), parameter));
  }
}

}  // namespace tessera::zero
