#include "ddp/ddp_model.h"

#include <algorithm>
#include <set>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "comm/base/local_work.h"
#include "ddp/bucket_cap.h"
#include "sharding/detection/detection.h"
#include "sharding/gradients/gradient_wire.h"
#include "tessera/config/option_reader.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

void check_options(const DistributedDataParallelOptions& options, int rank) {
  const auto component = fmt::format("{}: rank {}", kDdpName, rank);
  check_option(component, "first_bucket_mb", options.first_bucket_mb, kPositive);
  check_option(component, "bucket_cap_mb", options.bucket_cap_mb, kPositive);
  sharding::refuse_parameter_wire(kDdpName, rank, options.wire);
  if (options.comm_hook && options.wire.gradients != WireFormat::float32) {
    throw UsageError(fmt::format(
        "{}: rank {}: option wire.gradients is {}, and option comm_hook replaces the reduction; "
        "expected one of the two",
        kDdpName, rank, to_string(options.wire.gradients)));
  }
}

}  // namespace

DdpModel::DdpModel(torch::nn::Module& the_module, ProcessGroup the_group,
                   const DistributedDataParallelOptions& options)
    : module(the_module),
      group(std::move(the_group)),
      options_(options),
      buffers_(the_module, options.buffers) {
  agree(group, [&] {
    check_options(options_, group.rank());
    collect_parameters();
    check_sharing();
    wrapped_ = sharding::WrappedParameters(kDdpName, group.rank(),
                                           sharding::Use::reduces_in_backward, all_);
    sharding::Page::check_orphan_writes(all_);
  });
}

void DdpModel::check_contract(const std::string& option_text) {
  auto contract = sharding::signatures(all_);
  for (auto& line : buffers_.signatures()) contract.push_back(std::move(line));
  contract.push_back(option_text);
  group.check_contract(kDdpName, contract);
}

void DdpModel::place() {
  if (options_.share_parameters) share_frozen();
  comm::run_local_work(group, kDdpName, [&] { materialize(module); });
}

void DdpModel::collect_parameters() {
  auto& ignored = options_.parameters_to_ignore;
  std::set<std::string> unknown(ignored.begin(), ignored.end());
  std::vector<std::string> names;
  for (const auto& [name, tensor] : named_parameters(module)) {
    names.push_back(name);
    unknown.erase(name);
    if (std::find(ignored.begin(), ignored.end(), name) == ignored.end())
      all_.push_back({name, tensor});
  }
  if (!unknown.empty()) {
    throw UsageError(fmt::format(
        "{}: rank {}: option parameters_to_ignore names {}, and the module has no such "
        "parameter{}",
        kDdpName, group.rank(), *unknown.begin(), did_you_mean(*unknown.begin(), names)));
  }
  sharding::check_parameters(kDdpName, all_, 0, group.rank());
  divide_parameters();
  sharding::check_wire_dtypes(kDdpName, group.rank(), options_.wire, trainable);
  if (trainable.empty())
    throw UsageError(
        fmt::format("{}: rank {}: no parameter requires a gradient; expected at least one",
                    kDdpName, group.rank()));
}

void DdpModel::check_sharing() const {
  if (!options_.share_parameters) return;
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(
        fmt::format("{}: rank {}: option share_parameters {}", kDdpName, group.rank(), reason));
  };
  for (const auto& [name, tensor] : frozen_) {
    if (!tensor.device().is_cpu())
      refuse(fmt::format("needs frozen parameters on the CPU, and {} is on {}", name,
                         tensor.device().str()));
  }
  if (group.size() > 1) {
    sharding::require_detection(
        fmt::format("{}: rank {}: option share_parameters", kDdpName, group.rank()),
        "the option off");
  }
}

/// [Note: one copy a host]
void DdpModel::share_frozen() {
  shared_ = std::make_unique<sharding::SharedParameters>(
      group, fmt::format("{}: rank {}", kDdpName, group.rank()),
      "ddp.with_shared_write([&] { … }), or trainable parameters before construction", true);
  std::vector<size_t> members(frozen_.size());
  for (size_t i = 0; i < members.size(); ++i) members[i] = i;
  shared_->place_whole(frozen_, members);
}

void DdpModel::divide_parameters() {
  trainable.clear();
  frozen_.clear();
  std::partition_copy(all_.begin(), all_.end(), std::back_inserter(trainable),
                      std::back_inserter(frozen_),
                      [](const auto& p) { return p.tensor.requires_grad(); });
}

bool DdpModel::follow_trainability() {
  std::vector<std::string> changes;
  std::vector<at::Tensor> thawed;
  for (const auto& [name, tensor] : frozen_) {
    if (!tensor.requires_grad()) continue;
    changes.push_back(name + " requires a gradient");
    thawed.push_back(tensor);
  }
  for (const auto& [name, tensor] : trainable)
    if (!tensor.requires_grad()) changes.push_back(name + " is frozen");
  const bool any =
      std::any_of(all_.begin(), all_.end(), [](const auto& p) { return p.tensor.requires_grad(); });
  if (changes.empty() || !any) return false;
  group.check_contract(fmt::format("{} (a change of requires_grad)", kDdpName), changes);
  for (const auto& tensor : thawed)
    if (is_shared(tensor)) shared_->take_out(tensor);
  divide_parameters();
  return true;
}

void DdpModel::check_followed() {
  for (const auto& [name, tensor] : frozen_) {
    if (!tensor.requires_grad() || !tensor.grad().defined()) continue;
    group.fail(fmt::format(
        "{}: rank {}: parameter {} got a gradient and was frozen in the last forward in training "
        "mode, so the gradient is not reduced; expected a forward with train() on, or "
        "requires_grad_(true) before construction",
        kDdpName, group.rank(), name));
  }
}

bool DdpModel::is_shared(const at::Tensor& tensor) const {
  return shared_ && shared_->holds(tensor);
}

/// A module that was put in the place of another one has parameters without a bucket.
void DdpModel::check_same_parameters() {
  std::unordered_set<const void*> known;
  for (const auto& [name, tensor] : all_) known.insert(tensor.unsafeGetTensorImpl());
  const auto& ignored = options_.parameters_to_ignore;
  for (const auto& [name, tensor] : named_parameters(module)) {
    if (known.contains(tensor.unsafeGetTensorImpl()) ||
        std::find(ignored.begin(), ignored.end(), name) != ignored.end())
      continue;
    group.fail(fmt::format(
        "{}: rank {}: parameter {} was not in the module at construction (replace_module()?), so "
        "its gradient is not reduced; expected the {} to be constructed after such changes",
        kDdpName, group.rank(), name, kDdpName));
  }
}

void DdpModel::with_shared_write(const std::function<void()>& write) {
  if (!shared_) {
    return agree(group, [&] {
      const at::NoGradGuard no_grad;
      write();
    });
  }
  shared_->write(write);
  for (const auto& [name, tensor] : frozen_) tensor.unsafeGetTensorImpl()->bump_version();
  if (shared_->any()) broadcast(0);
}

int64_t DdpModel::parameter_bytes() const {
  int64_t bytes = shared_ ? shared_->own_bytes() : 0;
  for (const auto& [name, tensor] : all_)
    if (!is_shared(tensor)) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

void DdpModel::broadcast(int root) {
  std::vector<at::Tensor> tensors;
  // Shared ones are rank 0's since they were placed.
  for (const auto& [name, tensor] : all_)
    if (!is_shared(tensor)) tensors.push_back(tensor);
  group.broadcast(tensors, root);
  buffers_.broadcast(group, root);
}

}  // namespace tessera
