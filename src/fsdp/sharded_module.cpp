#include "fsdp/sharded_module.h"

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "memory/heap.h"
#include "sharding/detection/detection.h"
#include "sharding/gradients/gradient_norm.h"
#include "tessera/error.h"

namespace tessera::fsdp {

ShardedModule::ShardedModule(torch::nn::Module& m, ProcessGroup group,
                             FullyShardedDataParallelOptions given)
    : module(m),
      options(std::move(given)),
      model(build_sharded_model(module, std::move(group), options)),
      join_leader(model.world),
      buffers(module, options.buffers) {
  residency = std::make_unique<Residency>(model, options, stats, join_leader, [this] {
    if (watch_) watch_->begin();
  });
  gradients = std::make_unique<Gradients>(
      model, stats, join_leader, options.wire.gradients,
      Gradients::Callbacks{[this](size_t unit) { residency->gradients_complete(unit); },
                           [this](size_t unit) { residency->gradients_done(unit); }});
  make_pages();
  for (const auto& flat : model.flats) {
    // A shard that is the parameter's own memory also has its version counter, so that autograd
    // notices writes of the optimizer to values that a graph has saved.
    for (size_t at = 0; flat.permanent && at < flat.members.size(); ++at) {
      flat.shards[at].tensor.unsafeGetTensorImpl()->set_version_counter(
          model.parameters[flat.members[at]].tensor.unsafeGetTensorImpl()->version_counter());
    }
  }
  std::vector<sharding::NamedTensor> replicated;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    if (model.flat_of(i).trainable) trainable_.push_back(i);
    if (model.flat_of(i).permanent) replicated.push_back(model.parameters[i]);
  }
  writes_ = sharding::ForwardWrites(std::move(replicated));
  watch();
}

ShardedModule::~ShardedModule() {
  watch_.reset();
  try {
    residency->release_all();
  } catch (const Error&) {
    // The error of a failed gather was thrown where it was waited for.
  }
}

std::string ShardedModule::prefix() const {
  return fmt::format("{}: rank {}", kName, model.world.rank());
}

void ShardedModule::watch() {
  watch_.reset();
  std::vector<at::Tensor> tensors;
  for (const auto i : trainable_) tensors.push_back(model.parameters[i].tensor);
  sharding::BackwardWatch::Callbacks callbacks;
  callbacks.began = [this] { gradients->begin_backward(); };
  callbacks.begin_before_first = true;
  callbacks.arrived = [this](size_t i, const at::Tensor& computed) {
    gradients->arrived(trainable_[i], computed);
  };
  callbacks.ended = [this] { end_backward(); };
  callbacks.abandoned = [this] {
    residency->leave_backward();
    gradients->abandon();
  };
  watch_ = std::make_unique<sharding::BackwardWatch>(tensors, std::move(callbacks));
}

void ShardedModule::end_backward() {
  residency->leave_backward();
  // autograd::grad() of an input (a gradient penalty) passes through the model and reduces nothing.
  const bool reduced = gradients->finish();
  // The optimizer is about to allocate its state, which stays. After the first backward freed
  // memory is returned, so that the state does not go into the gaps that backward has left.
  if (!std::exchange(trimmed_, true)) memory::return_freed_memory();
  join_leader.broadcast_event(BackwardEnds{reduced});
  residency->end_backward();
  if (reduced) buffers.synchronize(model.world, has_data_);
}

void ShardedModule::require_idle(const char* call) {
  if (residency->running() || watch_->running())
    throw UsageError(fmt::format(
        "{}: {} was called while the model runs; expected outside of forward and backward",
        prefix(), call));
  if (!summoned.empty())
    throw UsageError(fmt::format("{}: {} was called inside summon_full_params(); expected after it",
                                 prefix(), call));
  model.take_back_shards();
}

void ShardedModule::check_parameters_unchanged(const char* since, const char* advice) {
  for (const auto& flat : model.flats) {
    const auto* expected = (flat.permanent ? flat.own_segment : flat.compute.page->flat())
                               .storage()
                               .unsafeGetStorageImpl();
    for (const auto i : flat.members) {
      if (!flat.trainable && model.parameters[i].tensor.requires_grad()) {
        model.world.fail(
            sharding::thawed_text(kName, model.parameters[i].name, model.world.rank()));
      }
      if (model.parameters[i].tensor.storage().unsafeGetStorageImpl() == expected) continue;
      model.world.fail(fmt::format(
          "{}: parameter {} has other storage than at {} (set_data, or module->to(…)?); "
          "expected {}",
          prefix(), model.parameters[i].name, since, advice));
    }
  }
}

void ShardedModule::begin_forward() {
  if (!summoned.empty()) {
    throw UsageError(prefix() +
                     ": forward was called inside summon_full_params(); expected after it, or the "
                     "module's own forward");
  }
  if (!residency->running()) {
    check_parameters_unchanged("construction", "such changes before the module is wrapped");
    // The autocast cache would keep a converted copy of every unit alive until the end of forward.
    autocast_cache_ = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(false);
    auto restore_cache =
        c10::make_scope_exit([this] { at::autocast::set_autocast_cache_enabled(autocast_cache_); });
    set_full_precision(options.mixed_precision.full_precision_in_eval && !module.is_training());
    model.take_back_shards();
    gradients->begin_forward(module.is_training() && at::GradMode::is_enabled());
    residency->begin_forward(full_precision_);
    if (at::GradMode::is_enabled()) writes_.begin();
    restore_cache.release();
  } else {
    residency->begin_forward(full_precision_);
  }
}

void ShardedModule::end_forward(bool threw) {
  const bool step_over = !at::GradMode::is_enabled();
  const auto restore_cache = c10::make_scope_exit([this] {
    if (!residency->running()) at::autocast::set_autocast_cache_enabled(autocast_cache_);
  });
  try {
    if (!threw) {
      check_parameters_unchanged(
          "the beginning of forward",
          "an initialisation that depends on data to be made by one forward of the module before "
          "it is wrapped, and other changes inside summon_full_params()");
    }
    if (!step_over && !residency->nested()) {
      writes_.pause(threw || join_leader.some_rank_has_no_data());
      writes_.compare(kName, model.world);
    }
  } catch (const Error&) {
    residency->abandon_forward(step_over);
    throw;
  }
  try {
    threw ? residency->abandon_forward(step_over) : residency->end_forward(step_over);
  } catch (const Error&) {
    if (!threw) throw;
  }
}

// A shard group holds each element of the model exactly once, so the norm over its shards counts
// each element once.
GradNorm ShardedModule::clip(double max_norm, double p) {
  sharding::check_max_norm(prefix(), max_norm);
  sharding::GradientNorm norm(prefix(), p);
  require_idle("clip_grad_norm_");
  gradients->notice_cleared();
  const at::NoGradGuard no_grad;
  const sharding::NoDetection no_detection;
  for (const auto* shard : shards()) norm.add(shard->tensor.grad());
  const auto& flats = model.flats;
  auto total =
      norm.total(model.shard_group, flats.empty() ? at::kCPU : flats.front().own_segment.device());
  if (!norm.any() && model.world.rank() == 0)
    spdlog::warn("tessera: {}: there are no gradients to take the norm of", kName);
  const sharding::NormClip clip(max_norm, total);
  for (const auto* shard : shards()) {
    if (shard->tensor.grad().defined()) clip.scale(shard->tensor.grad());
  }
  return GradNorm(std::move(total));
}

// [Note: full precision in evaluation] The dtype of a parameter is that of the page that it is a
// view of. So a flat parameter has two pages, each with its slots: one in the compute dtype of
// mixed precision, one in the shards' dtype. Only one of them is in use. The use of a tensor that a
// graph has kept from the other is an error.

void convert_buffers(ShardedModel& model, const std::optional<at::ScalarType>& dtype) {
  for (auto& [buffer, own] : model.buffers) {
    const auto wanted = dtype.value_or(own);
    if (buffer.scalar_type() != wanted) buffer.set_data(buffer.detach().to(wanted));
  }
}

void ShardedModule::set_full_precision(bool full) {
  if (full == full_precision_) return;
  full_precision_ = full;
  const c10::InferenceMode off(false);  // pages outlive the caller's InferenceMode
  at::NoGradGuard no_grad;
  residency->release_all();
  std::vector<size_t> changing;
  for (size_t f = 0; f < model.flats.size(); ++f) {
    if (model.flats[f].compute.dtype != model.flats[f].idle.dtype) changing.push_back(f);
  }
  for (const auto f : changing) std::swap(model.flats[f].compute, model.flats[f].idle);
  for (const auto f : changing) {
    // Only now, because a pool's capacity is that of the largest flat of its dtype: all flats must
    // have their new dtype.
    if (!model.flats[f].compute.page) make_page(f);
    restore(model.flats[f]);
  }
  model.measure();
  convert_buffers(model, full ? std::nullopt : options.mixed_precision.buffer_dtype);
  watch();  // set_data() with another dtype gives a parameter a new gradient accumulator
}

}  // namespace tessera::fsdp
