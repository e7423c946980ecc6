#include "deferred/registry.h"

#include <spdlog/spdlog.h>

#include "memory/placement_allocator.h"
#include "tessera/detail/torch_compat.h"

namespace tessera::deferred {
namespace {

/// Pages of recently used regions that stay while a scope is open, in bytes.
constexpr size_t kBudget = 32 << 20;

}  // namespace

Registry& Registry::instance() {
  static auto* const registry = new Registry;  // never destroyed: tensors may outlive it
  return *registry;
}

at::DataPtr Registry::allocate(size_t bytes) {
  auto region = std::make_shared<Region>(bytes);
  void* const base = region->mapping.base();
  {
    const std::lock_guard lock(mutex);
    regions_[region->mapping.base()] = region;
    ++stats.deferred;
  }
  const auto release = [this, region](void*) { forget(region); };
  return memory::place_in(
      at::from_blob(base, {static_cast<int64_t>(bytes)}, release, at::TensorOptions(at::kByte)));
}

RegionPtr Registry::find(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != at::kCPU || tensor.layout() != at::kStrided ||
      !tensor.has_storage())
    return nullptr;
  return find(compat::unchecked_data_ptr(tensor.storage().unsafeGetStorageImpl()).get());
}

RegionPtr Registry::find(const void* address) {
  if (address == nullptr) return nullptr;
  const std::lock_guard lock(mutex);
  auto next = regions_.upper_bound(static_cast<const char*>(address));
  if (next == regions_.begin()) return nullptr;
  auto region = std::prev(next)->second.lock();
  return region && region->mapping.contains(address) ? region : nullptr;
}

void Registry::forget(const RegionPtr& region) {
  const std::lock_guard lock(mutex);
  regions_.erase(region->mapping.base());
  take_from_present(region);
  // Logs of other regions may need the region's log, but not its memory.
  region->mapping.drop();
  region->state = Region::State::absent;
}

void Registry::take_from_present(const RegionPtr& region) {
  for (auto it = present_.begin(); it != present_.end(); ++it) {
    if (*it != region) continue;
    present_bytes_ -= region->mapping.bytes();
    present_.erase(it);
    return;
  }
}

void Registry::bring(const RegionPtr& region, bool contents) {
  using State = Region::State;
  if (region->state == State::ordinary || region->state == State::fresh) return;
  take_from_present(region);
  if (region->state == State::absent && contents)
    region->mapping.take(*build(*region, region->version()));
  else region->mapping.allow(Mapping::Access::write);
  region->state = State::present;
}

void Registry::put_away(const RegionPtr& region) {
  if (region->state == Region::State::ordinary || region->log.empty()) return;
  region->mapping.allow(Mapping::Access::none);
  region->state = Region::State::present;
  take_from_present(region);
  present_.push_back(region);
  present_bytes_ += region->mapping.bytes();
  while (present_bytes_ > kBudget) drop_pages(RegionPtr(present_.front()));
}

void Registry::drop_pages(const RegionPtr& region) {
  if (region->state != Region::State::present) return;
  take_from_present(region);
  region->mapping.allow(Mapping::Access::none);
  region->mapping.drop();
  region->state = Region::State::absent;
}

void Registry::add_load(const RegionPtr& region, std::function<void(const Mapping&)> load) {
  drop_pages(region);
  if (region->state == Region::State::fresh) region->mapping.allow(Mapping::Access::none);
  region->log.push_back({nullptr, true, std::move(load)});
  region->state = Region::State::absent;
}

void Registry::drop_pages() {
  while (!present_.empty()) drop_pages(RegionPtr(present_.front()));
}

void Registry::check_unlogged() {
  for (const auto& [base, weak] : regions_) {
    const auto region = weak.lock();
    if (region && region->state == Region::State::fresh &&
        region->maker == std::this_thread::get_id() && region->mapping.touched())
      give_up(region, "it was written by address");
  }
}

void Registry::release(const RegionPtr& region) {
  bring(region);
  region->state = Region::State::ordinary;
}

void Registry::give_up(const RegionPtr& region, const std::string& reason) {
  if (region->state == Region::State::ordinary) return;
  release(region);
  ++stats.computed;
  stats.computed_bytes += static_cast<int64_t>(region->mapping.bytes());
  spdlog::debug("tessera: deferred_init: {} bytes are computed at once: {}",
                region->mapping.bytes(), reason);
}

}  // namespace tessera::deferred
