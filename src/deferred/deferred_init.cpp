#include "tessera/memory/deferred_init.h"

#include "deferred/contents.h"
#include "deferred/recorder.h"
#include "memory/malloc_allocator.h"
#include "memory/placement_allocator.h"
#include "tessera/error.h"

namespace tessera {
namespace deferred {
namespace {

class RegionSource final : public memory::MemorySource {
 public:
  at::DataPtr serve(size_t bytes, at::Allocator& heap) override {
    return deferring() ? Registry::instance().allocate(bytes) : heap.allocate(bytes);
  }
};

/// What a scope changes on its thread.
struct ThreadState {
  std::shared_ptr<RegionSource> source = std::make_shared<RegionSource>();
  std::weak_ptr<memory::MemorySource> source_before;
  bool included_before = false;
};
thread_local std::optional<ThreadState> state;

bool is_kept(const RegionPtr& region) {
  return !region || region->state == Region::State::ordinary ||
         region->state == Region::State::fresh;
}

void require_effect() {
  const auto probe = c10::GetAllocator(at::kCPU)->allocate(memory::kMinPlacementBytes);
  if (Registry::instance().find(probe.get())) return;
  throw UsageError(
      "deferred_init: a CPU allocator of the program hides the one of this library, so nothing can "
      "be deferred; expected libtorch's allocator, or construction without deferred_init");
}

void begin() {
  if (!start_recording()) {
    throw UsageError(
        "deferred_init: another library of this process has a fallback on the dispatch key Fake; "
        "expected a process without that library, or construction without deferred_init");
  }
  handle_faults();
  // Only libtorch's own allocator can be replaced by malloc; later it would be behind this one.
  memory::use_malloc_for_tensors();
  state.emplace();
  state->source_before = memory::memory_source();
  state->included_before = c10::impl::tls_is_dispatch_key_included(kRecordingKey);
  memory::set_memory_source(state->source);
  deferring() = true;
  c10::impl::tls_set_dispatch_key_included(kRecordingKey, true);
}

void end() {
  c10::impl::tls_set_dispatch_key_included(kRecordingKey, state->included_before);
  deferring() = false;
  memory::set_memory_source(state->source_before);
  state.reset();
  auto& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  registry.check_unlogged();
  registry.drop_pages();
}

}  // namespace

Contents::Contents(const at::Tensor& tensor) : region_(Registry::instance().find(tensor)) {
  const std::lock_guard lock(Registry::instance().mutex);
  if (is_kept(region_)) region_ = nullptr;
  else Registry::instance().bring(region_);
}

Contents::~Contents() {
  if (!region_) return;
  const std::lock_guard lock(Registry::instance().mutex);
  Registry::instance().drop_pages(region_);
}

}  // namespace deferred

DeferredScope::DeferredScope() : outermost_(!deferred::state) {
  if (!outermost_) return;
  deferred::begin();
  try {
    deferred::require_effect();
  } catch (...) {
    deferred::end();
    throw;
  }
}

DeferredScope::~DeferredScope() {
  if (outermost_) deferred::end();
}

bool is_deferred(const at::Tensor& tensor) {
  auto& registry = deferred::Registry::instance();
  const std::lock_guard lock(registry.mutex);
  return !deferred::is_kept(registry.find(tensor));
}

void materialize(const at::Tensor& tensor) {
  auto& registry = deferred::Registry::instance();
  const std::lock_guard lock(registry.mutex);
  if (const auto region = registry.find(tensor)) registry.release(region);
}

void materialize(torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) materialize(parameter);
  for (const auto& buffer : module.buffers()) materialize(buffer);
}

bool detail::load_later(const at::Tensor& tensor, std::function<void(at::Tensor)> load) {
  auto& registry = deferred::Registry::instance();
  const std::lock_guard lock(registry.mutex);
  const auto region = registry.find(tensor);
  const bool whole = tensor.is_contiguous() && tensor.nbytes() == tensor.storage().nbytes();
  if (!region || region->state == deferred::Region::State::ordinary || !whole) return false;
  registry.add_load(region, [extent = deferred::Extent(tensor), load = std::move(load)](
                                const deferred::Mapping& mapping) { load(extent.in(mapping)); });
  return true;
}

DeferredStats deferred_stats() {
  auto& registry = deferred::Registry::instance();
  const std::lock_guard lock(registry.mutex);
  return registry.stats;
}

}  // namespace tessera
