#include "tessera/memory/deferred_init.h"

#include <mutex>

#include <c10/util/ScopeExit.h>
#include <spdlog/spdlog.h>

#include "deferred/contents.h"
#include "deferred/recorder.h"
#include "memory/malloc_allocator.h"
#include "memory/placement_allocator.h"

namespace tessera {
namespace deferred {
namespace {

class RegionSource final : public memory::MemorySource {
 public:
  /// True if libtorch's allocations reach the source of this thread's open scope.
  static bool is_reached() {
    const auto probe = c10::GetAllocator(at::kCPU)->allocate(memory::kMinPlacementBytes);
    return Registry::instance().find(probe.get()) != nullptr;
  }

  at::DataPtr serve(size_t bytes, at::Allocator& heap) override {
    return deferring() ? Registry::instance().allocate(bytes) : heap.allocate(bytes);
  }
};

/// The state of a thread that a scope changes while it is open.
struct ThreadState {
  ThreadState() {
    memory::set_memory_source(source);
    deferring() = true;
    c10::impl::tls_set_dispatch_key_included(kRecordingKey, true);
  }
  ~ThreadState() {
    c10::impl::tls_set_dispatch_key_included(kRecordingKey, included_before);
    deferring() = false;
    memory::set_memory_source(source_before);
  }
  ThreadState(const ThreadState&) = delete;

  std::shared_ptr<RegionSource> source = std::make_shared<RegionSource>();
  std::weak_ptr<memory::MemorySource> source_before = memory::memory_source();
  bool included_before = c10::impl::tls_is_dispatch_key_included(kRecordingKey);
};
thread_local std::optional<ThreadState> state;

bool is_kept(const RegionPtr& region) {
  return !region || region->state == Region::State::ordinary ||
         region->state == Region::State::fresh;
}

bool construct_at_once(const char* reason) {
  static std::once_flag once;
  std::call_once(once, [&] {
    spdlog::warn("tessera: deferred_init: {}, so modules are constructed with their memory",
                 reason);
  });
  return false;
}

/// False, with one line in the log, if this process cannot defer.
bool begin() {
  if (!start_recording())
    return construct_at_once("another library has taken the dispatch key DeferredInit");
  handle_faults();
  // Must come first: only libtorch's own allocator can be replaced by malloc.
  memory::use_malloc_for_tensors();
  state.emplace();
  auto undo = c10::make_scope_exit([] { state.reset(); });
  if (!RegionSource::is_reached())
    return construct_at_once("a CPU allocator of the program hides the one of this library");
  undo.release();
  return true;
}

void end() {
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

DeferredScope::DeferredScope() : outermost_(!deferred::state && deferred::begin()) {}

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
