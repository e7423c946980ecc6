#include "fsdp/core.h"

#include "comm/memory.h"
#include "tessera/error.h"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>

namespace tessera::fsdp {

Core::Core(torch::nn::Module& m, ProcessGroup group, FullyShardedDataParallelOptions given)
    : module(m), options(std::move(given)), detection(start_detection(options.detection)), model(build(module, std::move(group), options)), lead(model.world) {
  residency = std::make_unique<Residency>(model, options, stats, lead, [this] { if (watch_) watch_->begin(); });
  gradients = std::make_unique<Gradients>(
      model, stats, lead,
      Gradients::Callbacks{[this](size_t unit) { residency->gradients_complete(unit); }, [this](size_t unit) { residency->gradients_done(unit); }});
  make_pages();
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    if (model.flat_of(i).trainable) trainable_.push_back(i);
  }
  watch();
}

Core::~Core() {
  watch_.reset();
  try {
    residency->release_all();
  } catch (const Error&) {
    // A gather that failed was told where it was waited for.
  }
  stop_detection(detection);
}

std::string Core::prefix() const { return fmt::format("{}: rank {}", kName, model.world.rank()); }

void Core::watch() {
  watch_.reset();
  std::vector<at::Tensor> tensors;
  for (const auto i : trainable_) tensors.push_back(model.parameters[i].tensor);
  sharding::BackwardWatch::Callbacks callbacks;
  callbacks.arrived = [this](size_t i, const at::Tensor&) { gradients->arrived(trainable_[i]); };
  callbacks.ended = [this] { end_backward(); };
  callbacks.abandoned = [this] {
    residency->leave_backward();
    gradients->abandon();
  };
  watch_ = std::make_unique<sharding::BackwardWatch>(tensors, std::move(callbacks));
}

void Core::end_backward() {
  residency->leave_backward();
  gradients->finish();
  // The optimizer is about to make its state, which stays: not between holes that this backward has left.
  if (!std::exchange(trimmed_, true)) comm::return_freed_memory();
  lead.tell(Event::Kind::over, {gradients->sync()});
  residency->end_backward();
}

void Core::require_idle(const char* call) const {
  if (residency->running() || watch_->running()) throw UsageError(fmt::format("{}: {} was called while the model runs; expected outside of forward and backward", prefix(), call));
  if (!summoned.empty()) throw UsageError(fmt::format("{}: {} was called inside summon_full_params(); expected after it", prefix(), call));
}

void Core::begin_forward() {
  if (!summoned.empty()) {
    throw UsageError(prefix() + ": forward was called inside summon_full_params(); expected after it, or the module's own forward");
  }
  if (!residency->running()) {
    for (const auto& flat : model.flats) {
      const auto* home = (flat.permanent ? flat.shard : flat.compute.page->flat()).storage().unsafeGetStorageImpl();
      for (const auto i : flat.members) {
        if (!flat.trainable && model.parameters[i].tensor.requires_grad()) {
          model.world.fail(fmt::format("{}: parameter {} requires a gradient, but was frozen at construction; expected it to be trainable then (it may be frozen later, and "
                                       "thawed), or to be wrapped anew", prefix(), model.parameters[i].name));
        }
        if (model.parameters[i].tensor.storage().unsafeGetStorageImpl() == home) continue;
        model.world.fail(fmt::format("{}: parameter {} has other storage than at construction (set_data, or module->to(…)?); wrap the module after such changes",
                                     prefix(), model.parameters[i].name));
      }
    }
    // Autocast would keep every unit's cast copy alive until the end of forward.
    autocast_cache_ = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_cache_enabled(false);
  }
  if (!residency->running()) set_full_precision(options.mixed_precision.full_precision_in_eval && !module.is_training());
  residency->begin_forward(full_precision_);
}

void Core::end_forward(bool threw) {
  const bool step_over = !at::GradMode::is_enabled();
  try {
    threw ? residency->abandon_forward(step_over) : residency->end_forward(step_over);
  } catch (const Error&) {
    if (!threw) throw;
  }
  if (!residency->running()) at::autocast::set_autocast_cache_enabled(autocast_cache_);
}

}  // namespace tessera::fsdp
