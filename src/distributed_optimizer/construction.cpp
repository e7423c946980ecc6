#include <algorithm>
#include <cctype>
#include <unordered_map>

#include <fmt/format.h>

#include "distributed_optimizer/impl.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using distributed_optimizer::PackItem;
using sharding::Bucket;
using sharding::Layout;

std::string dtype_name(const at::Tensor& tensor) {
  std::string name = c10::toString(tensor.scalar_type());
  switch (tensor.scalar_type()) {
    case at::kHalf:
      name = "float16";
      break;
    case at::kBFloat16:
      name = "bfloat16";
      break;
    case at::kFloat:
      name = "float32";
      break;
    case at::kDouble:
      name = "float64";
      break;
    default:
      break;
  }
  return tensor.device().is_cpu() ? name : name + " " + tensor.device().str();
}

}  // namespace

DistributedOptimizer::Impl::Impl(std::shared_ptr<torch::optim::Optimizer> optimizer,
                                 const NamedParameters& names,
                                 const std::vector<std::optional<ProcessGroup>>& dist_groups,
                                 Options options)
    : optimizer_(std::move(optimizer)), names_(names), options_(std::move(options)) {
  const auto groups = optimizer_->param_groups().size();
  if (dist_groups.size() != groups) {
    throw UsageError(
        fmt::format("{}: there are {} dist_groups for {} parameter groups; expected one entry for "
                    "each (an empty one: "
                    "not synchronised)",
                    kName, dist_groups.size(), groups));
  }
  for (size_t g = 0; g < groups; ++g) {
    if (dist_groups[g]) add_lane(g, *dist_groups[g], names);
  }
  check_options();
  check_contract();
  if (options_.bcast_period >= 0) broadcast(0);
  make_reducer();
}

std::string DistributedOptimizer::Impl::prefix() const {
  return lanes_.empty() ? kName : fmt::format("{}: rank {}", kName, lanes_[0].group.rank());
}

void DistributedOptimizer::Impl::add_lane(size_t index, ProcessGroup group,
                                          const NamedParameters& names) {
  std::unordered_map<const void*, std::string> name_of;
  for (const auto& [name, tensor] : names) name_of.emplace(tensor.unsafeGetTensorImpl(), name);
  Lane lane{std::move(group),
            index,
            optimizer_->param_groups()[index].params(),
            {},
            {},
            {},
            false,
            false};
  std::vector<sharding::NamedTensor> named;
  for (const auto& tensor : lane.tensors) {
    const auto found = name_of.find(tensor.unsafeGetTensorImpl());
    if (tensor.defined() && found == name_of.end()) {
      throw UsageError(
          fmt::format("{}: group {}, parameter {}: it has no name; expected each parameter of the "
                      "optimizer among the names",
                      kName, index, named.size()));
    }
    named.push_back({found == name_of.end() ? "?" : found->second, tensor});
  }
  sharding::check_parameters(kName, named, index, lane.group.rank());
  for (auto& parameter : named) {
    if (!parameter.tensor.requires_grad()) {
      frozen_.push_back(parameter.tensor);
      continue;
    }
    lane.members.push_back(trainable_.size());
    lane_of_.push_back(lanes_.size());
    trainable_.push_back(std::move(parameter));
  }
  lanes_.push_back(std::move(lane));
}

void DistributedOptimizer::Impl::check_options() {
  std::string method = options_.reduce_method;
  std::transform(method.begin(), method.end(), method.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  const bool alone = std::all_of(lanes_.begin(), lanes_.end(),
                                 [](const Lane& lane) { return lane.group.size() == 1; });
  if (method != "sum" && method != "mean" && !(alone && method.empty())) {
    throw UsageError(fmt::format("{}: option reduce_method is \"{}\"; expected \"sum\" or \"mean\"",
                                 prefix(), options_.reduce_method));
  }
  mean_ = method == "mean";
  if (options_.bcast_period < -1) {
    throw UsageError(fmt::format(
        "{}: option bcast_period is {}; expected -1 (never), 0 (once) or a number of steps",
        prefix(), options_.bcast_period));
  }
  if (options_.param_pack_thd <= 0) {
    throw UsageError(
        fmt::format("{}: option param_pack_thd is {}; expected a positive number of bytes",
                    prefix(), options_.param_pack_thd));
  }
}

void DistributedOptimizer::Impl::check_contract() {
  for (auto& lane : lanes_) {
    std::vector<std::string> contract;
    for (const auto i : lane.members) contract.push_back(sharding::signature(trainable_[i]));
    contract.push_back(fmt::format("parameters: {}", lane.tensors.size()));
    contract.push_back(
        fmt::format("options: reduce_method {}, bcast_period {}, param_pack {}, param_pack_thd {}",
                    mean_ ? "mean" : "sum", options_.bcast_period, options_.param_pack,
                    options_.param_pack_thd));
    lane.group.check_contract(kName, contract);
  }
}

/// What was frozen has no hook; its gradients would silently stay this rank's own.
void DistributedOptimizer::Impl::check_trainability() const {
  for (const auto& tensor : frozen_) {
    if (!tensor.requires_grad()) continue;
    for (const auto& [name, known] : names_) {
      if (!known.is_same(tensor)) continue;
      throw UsageError(fmt::format(
          "{}: parameter {} was frozen at construction and requires a gradient now; construct "
          "the optimizer after such changes",
          prefix(), name));
    }
  }
}

double DistributedOptimizer::Impl::scale(const Lane& lane) const {
  return mean_ ? 1.0 / (divisor_ ? divisor_ : lane.group.size()) : 1;
}

void DistributedOptimizer::Impl::make_reducer() {
  if (trainable_.empty()) return;
  for (auto& lane : lanes_) {
    // Backward produces gradients from the last parameter to the first.
    for (auto i = lane.members.rbegin(); i != lane.members.rend(); ++i) lane.packs.push_back({*i});
  }
  sharding::ReducerOptions reducing;
  reducing.component = kName;
  reducing.find_unused_parameters = true;
  reducing.caller_tracks_use = true;
  // Packs are copies, so that what this rank contributed is still there if a pack does not count.
  reducing.gradient_as_bucket_view = !options_.param_pack;
  reducer_ = std::make_unique<sharding::Reducer>(
      lanes_[0].group, trainable_, make_buckets(), reducing,
      sharding::Reducer::Callbacks{[this](size_t bucket) { send(bucket); }, [this] { finish(); },
                                   [this] { drain(); }});
}

std::vector<Bucket> DistributedOptimizer::Impl::make_buckets() {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : trainable_) tensors.push_back(parameter.tensor);
  std::vector<Bucket> buckets;
  for (size_t l = 0; l < lanes_.size(); ++l) {
    for (const auto& pack : lanes_[l].packs) {
      std::vector<int64_t> sizes;
      for (const auto i : pack) sizes.push_back(tensors[i].numel());
      auto layout = Layout::flat(std::move(sizes), lanes_[l].group.size());
      auto flat =
          lanes_[l].group.allocate(layout.numel(), tensors[pack[0]].options().requires_grad(false));
      buckets.push_back(sharding::make_bucket(pack, std::move(layout), std::move(flat), tensors));
      buckets.back().lane = l;
    }
  }
  followed_.assign(buckets.size(), true);
  return buckets;
}

/// The packing that rank 0's order of arrival gives becomes everyone's.
void DistributedOptimizer::Impl::repack() {
  if (std::none_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.repack_due; }))
    return;
  std::vector<PackItem> items;
  for (const auto& [name, tensor] : trainable_)
    items.push_back({dtype_name(tensor), static_cast<int64_t>(tensor.nbytes())});
  for (auto& lane : lanes_) {
    if (!lane.repack_due) continue;
    // Places in the lane: its ranks may have other groups besides.
    const auto first = lane.members.front();
    auto packs =
        distributed_optimizer::pack_by_arrival(items, lane.record, options_.param_pack_thd);
    for (const auto i : lane.members) {
      if (std::find(lane.record.begin(), lane.record.end(), i) == lane.record.end())
        packs.push_back({i});
    }
    for (auto& pack : packs) {
      for (auto& i : pack) i -= first;
    }
    lane.packs = distributed_optimizer::packs_from_text(
        lane.group.broadcast_bytes(distributed_optimizer::to_text(packs), publisher_));
    for (auto& pack : lane.packs) {
      for (auto& i : pack) i += first;
    }
    lane.packed = true;
    lane.repack_due = false;
  }
  reducer_->replace_buckets(make_buckets());
}

}  // namespace tessera
