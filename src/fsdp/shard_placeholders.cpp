#include "fsdp/shard_placeholders.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include "tessera/error.h"

namespace tessera::fsdp {

class ShardPlaceholders::Meta : public torch::autograd::AutogradMeta {
 public:
  Meta(std::shared_ptr<ShardPlaceholders*> owner, size_t parameter, bool trainable)
      : owner_(std::move(owner)), parameter_(parameter) {
    requires_grad_ = trainable;
  }
  torch::autograd::Variable& mutable_grad() override {
    if (*owner_) (*owner_)->accessed(parameter_, true, is_missing());
    return grad_;
  }
  const torch::autograd::Variable& grad() const override {
    if (*owner_) (*owner_)->accessed(parameter_, false, is_missing());
    return grad_;
  }

 private:
  bool is_missing() const { return requires_grad_ && !grad_.defined(); }

  std::shared_ptr<ShardPlaceholders*> owner_;
  size_t parameter_;
};

ShardPlaceholders::ShardPlaceholders(ShardedModel& model, GradientBuffers& buffers,
                                     Reductions& reductions)
    : model_(model),
      buffers_(buffers),
      reductions_(reductions),
      placeholders_(model.parameters, fmt::format("{}: rank {}", kName, model.world.rank()),
                    "Optimizer(fsdp.parameters(), …), fsdp.clip_grad_norm_(…), or .grad() of "
                    "fsdp.named_parameters()",
                    [this](size_t parameter) { zero(parameter); }),
      self_(std::make_shared<ShardPlaceholders*>(this)) {
  for (const auto* shard : model.shards()) {
    const auto& tensor = shard->tensor;
    tensor.unsafeGetTensorImpl()->set_autograd_meta(
        std::make_unique<Meta>(self_, shard->parameter, tensor.requires_grad()));
  }
}

void ShardPlaceholders::refuse_set() {
  for (size_t i = 0; i < model_.parameters.size(); ++i) {
    const auto text = placeholders_.set_by_program(i);
    if (!text.empty()) model_.world.fail(text);
  }
}

void ShardPlaceholders::notice() {
  refuse_set();
  placeholders_.notice([this](size_t parameter) { clear(parameter); });
}

void ShardPlaceholders::begin_backward() {
  notice();
  take_away();
  busy_ = true;
}

void ShardPlaceholders::end_backward() {
  for (const auto* flat : model_.flats) {
    for (size_t m = 0; m < flat->members.size(); ++m)
      if (flat->gradients.has[m] || flat->shards[m].tensor.grad().defined())
        placeholders_.show(flat->members[m]);
  }
  busy_ = false;
}

void ShardPlaceholders::zero(size_t parameter) {
  const std::lock_guard lock(*model_.mutex);
  reductions_.finish_late();  // no operator that detects them runs here
  const at::NoGradGuard no_grad;
  const auto& [flat, member] = model_.places[parameter];
  const auto& grad = flat->shards[member].tensor.grad();
  if (grad.defined()) grad.zero_();
  if (flat->gradients.has[member]) flat->gradients.views[member].zero_();
}

void ShardPlaceholders::clear(size_t parameter) {
  const auto own = own_access();
  const auto& [flat, member] = model_.places[parameter];
  flat->shards[member].tensor.mutable_grad() = at::Tensor();
  auto& has = flat->gradients.has;
  has[member] = 0;
  if (std::count(has.begin(), has.end(), 1) == 0) buffers_.drop(*flat);
}

/// The program is about to read the gradient of a shard, or `to_write` it: then the parameter gets
/// a placeholder, so that zero_grad() of the module clears what the program may set. `missing`: the
/// shard has none, unless another rank has used the parameter.
void ShardPlaceholders::accessed(size_t parameter, bool to_write, bool missing) {
  if (busy_) return;
  const std::lock_guard lock(*model_.mutex);
  if (missing) {
    const auto own = own_access();
    reductions_.finish_late();
  }
  const auto text = placeholders_.set_by_program(parameter);
  if (!text.empty()) throw UsageError(text);
  if (placeholders_.take_removed(parameter)) clear(parameter);
  const c10::InferenceMode off(false);  // the placeholder outlives the caller's
  if (to_write && !placeholders_.shown(parameter)) placeholders_.show(parameter);
}

}  // namespace tessera::fsdp
