#include "sharding/detection/arriving_pages.h"

#include <utility>

namespace tessera::sharding {

std::unique_ptr<Page> ArrivingPages::make_page(const at::Tensor& memory) {
  auto page = std::make_unique<Page>(this, pages_++, memory.numel(), memory.options(), "");
  page->attach(memory);
  return page;
}

void ArrivingPages::begin(Page& page, at::Tensor memory, Work collective) {
  const std::lock_guard lock(mutex_);
  page.detach();
  if (arriving_.empty()) first_ = page.index();
  arriving_.insert_or_assign(page.index(),
                             Arriving{&page, std::move(memory), std::move(collective)});
}

void ArrivingPages::wait_all() {
  const std::lock_guard lock(mutex_);
  if (const auto first = arriving_.find(first_); first != arriving_.end()) wait(first);
  while (!arriving_.empty()) wait(arriving_.begin());
}

void ArrivingPages::release() noexcept {
  try {
    wait_all();
  } catch (...) {
    for (auto& [index, arriving] : arriving_) arriving.page->attach(std::move(arriving.memory));
    arriving_.clear();
  }
}

void ArrivingPages::need(c10::ArrayRef<PageUse> uses, std::string_view op) {
  const std::lock_guard lock(mutex_);
  if (arriving_.empty()) return;
  for (const auto& use : uses) {
    const auto found = arriving_.find(use.page->index());
    if (found == arriving_.end()) continue;
    const auto first = arriving_.find(first_);
    if (first != arriving_.end() && first != found) wait(first);
    wait(found);
  }
}

void ArrivingPages::wait(std::map<size_t, Arriving>::iterator arriving) {
  arriving->second.collective.wait();
  arriving->second.page->attach(std::move(arriving->second.memory));
  arriving_.erase(arriving);
}

}  // namespace tessera::sharding
