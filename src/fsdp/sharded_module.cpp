#include "fsdp/sharded_module.h"

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "comm/execution/diverged.h"
#include "memory/heap.h"
#include "sharding/detection/detection.h"
#include "sharding/gradients/gradient_norm.h"
#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

template <class... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};
template <class... Functions>
Overloaded(Functions...) -> Overloaded<Functions...>;

}  // namespace

ShardedModule::ShardedModule(torch::nn::Module& m, ProcessGroup group,
                             FullyShardedDataParallelOptions given)
    : module(m),
      options(std::move(given)),
      model(build_sharded_model(module, std::move(group), options)),
      join_leader(model.world),
      buffers(module, options.buffers) {
  residency = std::make_unique<Residency>(model, options, stats, join_leader);
  gradients = std::make_unique<Gradients>(model, options, stats, join_leader, *residency);
  pages = std::make_unique<UnitPages>(model, *residency);
  std::vector<sharding::NamedTensor> replicated;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    const auto& [flat, member] = model.places[i];
    if (!flat->permanent) continue;
    replicated.push_back(model.parameters[i]);
    // A shard that is the parameter's own memory also has its version counter, so that autograd
    // notices writes of the optimizer to values that a graph has saved.
    flat->shards[member].tensor.unsafeGetTensorImpl()->set_version_counter(
        model.parameters[i].tensor.unsafeGetTensorImpl()->version_counter());
  }
  writes_ = sharding::ForwardWrites(std::move(replicated));
  watch();
}

ShardedModule::~ShardedModule() {
  model.watch.reset();
  gradients.reset();
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
  model.watch.reset();
  std::vector<at::Tensor> tensors;
  std::vector<size_t> trainable;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    if (!model.places[i].flat->trainable) continue;
    trainable.push_back(i);
    tensors.push_back(model.parameters[i].tensor);
  }
  sharding::BackwardWatch::Callbacks callbacks;
  callbacks.began = [this] { gradients->begin_backward(); };
  callbacks.begin_before_first = true;
  callbacks.arrived = [this, trainable](size_t i, const at::Tensor& computed) {
    gradients->arrived(trainable[i], computed);
  };
  callbacks.ended = [this](bool complete) {
    if (complete) return end_backward(true);
    residency->leave_backward();
    gradients->abandon();
  };
  model.watch = std::make_unique<sharding::BackwardWatch>(tensors, std::move(callbacks));
}

void ShardedModule::end_backward(bool has_data) {
  residency->leave_backward();
  // autograd::grad() of an input (a gradient penalty) passes through the model and reduces nothing.
  bool reduced = gradients->end_backward();
  // The optimizer is about to allocate its state, which stays. After the first backward freed
  // memory is returned, so that the state does not go into the gaps that backward has left.
  if (!std::exchange(trimmed_, true)) memory::return_freed_memory();
  join_leader.broadcast_event(BackwardEnds{reduced});
  try {
    residency->end_backward(reduced);
  } catch (const comm::Diverged&) {
    residency->diverge();
    reduced = gradients->end_diverged_backward() || reduced;
    residency->end_backward(reduced);
  }
  if (!reduced || !buffers.synchronizes()) return;
  gradients->wait();  // a collective of its own would meet what other ranks do after a divergence
  buffers.synchronize(model.world, has_data);
}

void ShardedModule::require_idle(const char* call) {
  if (residency->forwards() > 0 || model.watch->running())
    throw UsageError(fmt::format(
        "{}: {} was called while the model runs; expected outside of forward and backward",
        prefix(), call));
  if (!summoned.empty())
    throw UsageError(fmt::format("{}: {} was called inside summon_full_params(); expected after it",
                                 prefix(), call));
  gradients->wait();
  model.take_back_shards();
}

void ShardedModule::check_parameters_unchanged(const char* since, const char* advice) {
  for (const auto* flat : model.flats) {
    const auto* expected = (flat->permanent ? flat->own_segment : flat->compute.page->flat())
                               .storage()
                               .unsafeGetStorageImpl();
    for (const auto i : flat->members) {
      if (!flat->trainable && model.parameters[i].tensor.requires_grad()) {
        model.world.fail(fmt::format(
            "{}: parameter {} requires a gradient since {}; expected requires_grad_() outside of "
            "forward",
            prefix(), model.parameters[i].name, since));
      }
      if (model.parameters[i].tensor.storage().unsafeGetStorageImpl() == expected) continue;
      model.world.fail(fmt::format(
          "{}: parameter {} has other storage than at {} (set_data, or module->to(…)?); "
          "expected {}",
          prefix(), model.parameters[i].name, since, advice));
    }
  }
}

void ShardedModule::follow_thaw() {
  std::vector<sharding::NamedTensor> thawed;
  std::vector<std::string> names;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    const auto& parameter = model.parameters[i];
    if (!parameter.tensor.requires_grad() || model.shard_of(i).tensor.requires_grad()) continue;
    thawed.push_back(parameter);
    names.push_back(parameter.name);
  }
  if (thawed.empty()) return;
  const c10::InferenceMode off(false);  // the gradients outlive the caller's InferenceMode
  model.world.check_contract(std::string(kName) + " (a change of requires_grad)", names);
  sharding::check_parameters(kName, thawed, 0, model.world.rank());
  gradients->wait();
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    if (!model.parameters[i].tensor.requires_grad()) continue;
    auto& flat = *model.places[i].flat;
    model.shard_of(i).tensor.set_requires_grad(true);
    if (std::exchange(flat.trainable, true)) continue;
    flat.gradients.defer_until_complete = is_mostly_one_parameter(flat);
    pages->make_gradients(flat);
  }
  watch();
}

void ShardedModule::begin_forward() {
  if (!summoned.empty()) {
    throw UsageError(prefix() +
                     ": forward was called inside summon_full_params(); expected after it, or the "
                     "module's own forward");
  }
  if (residency->forwards() == 0) {
    follow_thaw();
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
    if (residency->forwards() == 0) at::autocast::set_autocast_cache_enabled(autocast_cache_);
  });
  try {
    if (!threw) {
      check_parameters_unchanged(
          "the beginning of forward",
          "an initialisation that depends on data to be made by one forward of the module before "
          "it is wrapped, and other changes inside summon_full_params()");
    }
    if (!step_over && residency->forwards() == 1) {
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
  for (const auto* shard : model.shards()) norm.add(shard->tensor.grad());
  const auto device = model.flats.empty() ? at::kCPU : model.flats[0]->own_segment.device();
  auto total = norm.total(model.shard_group, device);
  if (!norm.any() && model.world.rank() == 0)
    spdlog::warn("tessera: {}: there are no gradients to take the norm of", kName);
  const sharding::NormClip clip(max_norm, total);
  for (const auto* shard : model.shards())
    if (shard->tensor.grad().defined()) clip.scale(shard->tensor.grad());
  return GradNorm(std::move(total));
}

void ShardedModule::clip_value(double clip_value) {
  sharding::check_clip_value(prefix(), clip_value);
  require_idle("clip_grad_value_");
  gradients->notice_cleared();
  at::NoGradGuard no_grad;
  for (const auto* shard : model.shards())
    if (shard->tensor.grad().defined())
      shard->tensor.mutable_grad().clamp_(-clip_value, clip_value);
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
  std::vector<FlatParameter*> changing;
  for (auto* flat : model.flats)
    if (flat->compute.dtype != flat->idle.dtype) changing.push_back(flat);
  for (auto* flat : changing) std::swap(flat->compute, flat->idle);
  for (auto* flat : changing) {
    // Only now, because a pool's capacity is that of the largest flat of its dtype: all flats must
    // have their new dtype.
    if (!flat->compute.page) pages->make(*flat);
    pages->restore(*flat);
  }
  convert_buffers(model, full ? std::nullopt : options.mixed_precision.buffer_dtype);
  watch();  // set_data() with another dtype gives a parameter a new gradient accumulator
}

void ShardedModule::shadow_backward() {
  require_idle("shadow_backward");
  const auto reset = c10::make_scope_exit([this] {
    while (residency->forwards() > 0) residency->abandon_forward(false);  // after an error
    gradients->follow_sync(std::nullopt);
    join_leader.follow(false);
  });
  follow_thaw();
  join_leader.follow(true);
  at::NoGradGuard no_grad;
  gradients->begin_backward();
  bool over = false;
  const Overloaded act{[&](const ForwardBegins& event) {
                         set_full_precision(event.full_precision);
                         residency->begin_forward(event.full_precision);
                       },
                       [&](const ForwardEnds&) { residency->end_forward(false); },
                       [&](const UnitsUsed& event) { residency->shadow_use(event); },
                       [&](const FirstGradient& event) {
                         gradients->follow_sync(event.sync);
                         gradients->shadow_gradient(event.flat);
                       },
                       [&](const GradientsReduced& event) { gradients->shadow_reduce(event); },
                       [&](const BackwardEnds& event) {
                         // Passes under no_sync(), and autograd::grad(), come before the one that
                         // reduces.
                         over = event.reduced;
                         gradients->follow_sync(event.reduced);
                         end_backward(false);
                         if (!over) gradients->begin_backward();
                       }};
  while (!over) std::visit(act, join_leader.receive_event());
}

void ShardedModule::shadow_step() {
  if (!step_of_shadow) {
    throw UsageError(prefix() +
                     ": join: some rank has no data, and no function was given that runs the "
                     "optimizer step on such a rank, which updates its shards of the parameters; "
                     "expected set_shadow_step([&] { optimizer.zero_grad(); "
                     "fsdp.shadow_backward(); optimizer.step(); }) before join()");
  }
  step_of_shadow();
}

void ShardedModule::finish_join(int last_active_rank) {
  // Every rank has updated its own shards in each step, but buffers changed only where there was
  // data.
  buffers.broadcast(model.world, last_active_rank);
}

}  // namespace tessera::fsdp
