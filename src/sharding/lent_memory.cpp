#include "sharding/lent_memory.h"

#include "tessera/torch_compat.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace tessera::sharding {
namespace {

/// By address, for libtorch also frees memory of which it knows no more than that (raw_deallocate).
struct Loans {
  std::mutex mutex;
  std::unordered_map<const void*, at::Tensor> owners;

  static Loans& instance() {
    static auto* const loans = new Loans;  // tensors may outlive all else
    return *loans;
  }

  bool take_back(const void* memory) {
    at::Tensor owner;  // may be the last to hold it: not under the lock
    std::lock_guard lock(mutex);
    const auto found = owners.find(memory);
    if (found == owners.end()) return false;
    owner = std::move(found->second);
    owners.erase(found);
    return true;
  }
};

thread_local std::weak_ptr<MemorySource> first;

class LendingAllocator final : public compat::Allocator {
 public:
  explicit LendingAllocator(at::Allocator* heap) : heap_(heap) { free_on_heap_ = heap->raw_deleter(); }

  at::DataPtr serve(size_t bytes) const override {
    if (bytes >= kWorthLending) {
      if (const auto source = first.lock()) return source->serve(bytes, *heap_);
    }
    return heap_->allocate(bytes);
  }
  at::DeleterFnPtr raw_deleter() const override { return free_on_heap_ ? &free_either : nullptr; }

 private:
  static void free_either(void* memory) {
    if (!Loans::instance().take_back(memory)) free_on_heap_(memory);
  }

  at::Allocator* heap_;
  static inline at::DeleterFnPtr free_on_heap_ = nullptr;
};

void install() {
  static const bool installed = [] {
    c10::SetAllocator(at::kCPU, new LendingAllocator(c10::GetAllocator(at::kCPU)));
    return true;
  }();
  static_cast<void>(installed);
}

}  // namespace

void ask_first(std::weak_ptr<MemorySource> source) {
  install();
  first = std::move(source);
}

std::shared_ptr<MemorySource> asked_first() { return first.lock(); }

at::DataPtr lend(const at::Tensor& owner) {
  auto& loans = Loans::instance();
  auto* const memory = owner.data_ptr();
  {
    std::lock_guard lock(loans.mutex);
    if (!loans.owners.emplace(memory, owner).second) return {};
  }
  return {memory, memory, [](void* lent) { Loans::instance().take_back(lent); }, at::Device(at::kCPU)};
}

bool is_lent(const at::Tensor& owner) {
  auto& loans = Loans::instance();
  std::lock_guard lock(loans.mutex);
  return loans.owners.contains(owner.data_ptr());
}

}  // namespace tessera::sharding
