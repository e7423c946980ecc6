#include "optim/late_updates.h"

#include <mutex>
#include <unordered_map>

namespace tessera::optim {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, LateUpdates*> of;
};

// Never destroyed: wrappers may outlive main().
Registry& registry() {
  static auto* const registry = new Registry;
  return *registry;
}

}  // namespace

LateUpdates* LateUpdates::of(const at::Tensor& parameter) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.of.find(parameter.unsafeGetTensorImpl());
  return found == all.of.end() ? nullptr : found->second;
}

void LateUpdates::add(const at::Tensor& parameter) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.of[parameter.unsafeGetTensorImpl()] = this;
}

void LateUpdates::remove_all() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.of, [this](const auto& entry) { return entry.second == this; });
}

}  // namespace tessera::optim
