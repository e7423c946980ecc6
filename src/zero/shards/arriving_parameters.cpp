#include "zero/shards/arriving_parameters.h"

#include <utility>

namespace tessera::zero {

std::unique_ptr<sharding::Page> ArrivingParameters::make_page(const at::Tensor& memory) {
  auto page =
      std::make_unique<sharding::Page>(this, pages_++, memory.numel(), memory.options(), "");
  page->attach(memory);
  return page;
}

void ArrivingParameters::begin(sharding::Page& page, at::Tensor memory, Work gather) {
  const std::lock_guard lock(mutex_);
  page.detach();
  arriving_.insert_or_assign(page.index(), Arriving{&page, std::move(memory), std::move(gather)});
}

void ArrivingParameters::wait_all() {
  const std::lock_guard lock(mutex_);
  while (!arriving_.empty()) wait(arriving_.begin());
}

void ArrivingParameters::release() noexcept {
  try {
    wait_all();
  } catch (...) {
    for (auto& [index, arriving] : arriving_) arriving.page->attach(std::move(arriving.memory));
    arriving_.clear();
  }
}

void ArrivingParameters::need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) {
  const std::lock_guard lock(mutex_);
  if (arriving_.empty()) return;
  for (const auto& use : uses) {
    const auto found = arriving_.find(use.page->index());
    if (found != arriving_.end()) wait(found);
  }
}

void ArrivingParameters::wait(std::map<size_t, Arriving>::iterator arriving) {
  arriving->second.gather.wait();
  arriving->second.page->attach(std::move(arriving->second.memory));
  arriving_.erase(arriving);
}

}  // namespace tessera::zero
