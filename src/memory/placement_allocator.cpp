#include "memory/placement_allocator.h"

#include <mutex>
#include <unordered_map>
#include <utility>

#include "tessera/detail/torch_compat.h"

namespace tessera::memory {
namespace {

/// The placed tensors by address: libtorch may free memory by its address alone (raw_deallocate).
struct Placements {
  std::mutex mutex;
  std::unordered_map<const void*, at::Tensor> owners;

  static Placements& instance() {
    static auto* const placements =
        new Placements;  // never destroyed: tensors may outlive static objects
    return *placements;
  }

  bool release(const void* memory) {
    at::Tensor owner;  // possibly the last reference: released after the lock
    std::lock_guard lock(mutex);
    const auto found = owners.find(memory);
    if (found == owners.end()) return false;
    owner = std::move(found->second);
    owners.erase(found);
    return true;
  }
};

thread_local std::weak_ptr<MemorySource> first;

class PlacementAllocator final : public compat::Allocator {
 public:
  explicit PlacementAllocator(at::Allocator* heap) : heap_(heap) {
    free_on_heap_ = heap->raw_deleter();
  }

  at::DataPtr serve(size_t bytes) const override {
    if (bytes >= kMinPlacementBytes) {
      if (const auto source = first.lock()) return source->serve(bytes, *heap_);
    }
    return heap_->allocate(bytes);
  }
  at::DeleterFnPtr raw_deleter() const override { return free_on_heap_ ? &free_either : nullptr; }

 private:
  static void free_either(void* memory) {
    if (!Placements::instance().release(memory)) free_on_heap_(memory);
  }

  at::Allocator* heap_;
  static inline at::DeleterFnPtr free_on_heap_ = nullptr;
};

void install() {
  static const bool installed = [] {
    c10::SetAllocator(at::kCPU, new PlacementAllocator(c10::GetAllocator(at::kCPU)));
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace

void set_memory_source(std::weak_ptr<MemorySource> source) {
  install();
  first = std::move(source);
}

std::shared_ptr<MemorySource> memory_source() { return first.lock(); }

at::DataPtr place_in(const at::Tensor& owner) {
  auto& placements = Placements::instance();
  auto* const memory = owner.data_ptr();
  {
    std::lock_guard lock(placements.mutex);
    if (!placements.owners.emplace(memory, owner).second) return {};
  }
  return {memory, memory, [](void* placed) { Placements::instance().release(placed); },
          at::Device(at::kCPU)};
}

bool is_placed(const at::Tensor& owner) {
  auto& placements = Placements::instance();
  std::lock_guard lock(placements.mutex);
  return placements.owners.contains(owner.data_ptr());
}

}  // namespace tessera::memory
