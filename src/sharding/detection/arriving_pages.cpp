#include "sharding/detection/arriving_pages.h"

#include <utility>

namespace tessera::sharding {

std::unique_ptr<Page> ArrivingPages::make_page(const at::Tensor& memory) {
  const std::lock_guard lock(mutex_);
  auto page = std::make_unique<Page>(this, pages_++, memory.numel(), memory.options(), "");
  page->attach(memory);
  return page;
}

void ArrivingPages::begin(Page& page, at::Tensor memory, Work collective) {
  const std::lock_guard lock(mutex_);
  const auto arrival = std::make_shared<Arrival>(Arrival{std::move(collective), {}, {}});
  if (arriving_.empty()) first_ = arrival;
  hold(arrival, page, std::move(memory));
}

bool ArrivingPages::follow(const Page& page, const std::vector<Page*>& followers,
                           std::function<void()> then) {
  const std::lock_guard lock(mutex_);
  const auto found = arriving_.find(page.index());
  if (found == arriving_.end()) return false;
  const auto arrival = found->second;
  for (auto* follower : followers) hold(arrival, *follower, follower->memory());
  arrival->then.push_back(std::move(then));
  return true;
}

void ArrivingPages::wait_all() {
  const std::lock_guard lock(mutex_);
  if (first_) wait(first_);
  while (!arriving_.empty()) wait(arriving_.begin()->second);
}

void ArrivingPages::release() noexcept {
  try {
    wait_all();
  } catch (...) {
    for (const auto& [index, arrival] : std::exchange(arriving_, {})) give_memory(*arrival);
    first_.reset();
  }
}

void ArrivingPages::need(c10::ArrayRef<PageUse> uses, std::string_view op) {
  const std::lock_guard lock(mutex_);
  if (arriving_.empty()) return;
  for (const auto& use : uses) {
    const auto found = arriving_.find(use.page->index());
    if (found == arriving_.end()) continue;
    const auto arrival = found->second;
    if (first_ && first_ != arrival) wait(first_);
    wait(arrival);
  }
}

void ArrivingPages::hold(const std::shared_ptr<Arrival>& arrival, Page& page, at::Tensor memory) {
  page.detach();
  arriving_.insert_or_assign(page.index(), arrival);
  arrival->held.push_back({&page, std::move(memory)});
}

void ArrivingPages::wait(const std::shared_ptr<Arrival>& arrival) {
  const auto one = arrival;  // first_ may be the argument
  one->collective.wait();
  for (const auto& held : one->held) arriving_.erase(held.page->index());
  if (first_ == one) first_.reset();
  give_memory(*one);
  for (const auto& then : one->then) then();
}

void ArrivingPages::give_memory(Arrival& arrival) {
  for (auto& [page, memory] : std::exchange(arrival.held, {})) page->attach(std::move(memory));
}

}  // namespace tessera::sharding
