#include "fsdp/paging/use_order.h"

#include <algorithm>
#include <utility>

namespace tessera::fsdp {

namespace {

// A model that runs only forward with gradients enabled never ends a step, so the record is
// bounded.
constexpr size_t kLongestStep = 1'000'000;

}  // namespace

void UseOrder::advance(const Use& use) {
  last_ = use;
  if (current_.size() >= kLongestStep) current_.clear();
  current_.push_back(use);
  if (lost_) return;
  if (cursor_ < recorded_.size() && recorded_[cursor_] == use) ++cursor_;
  else find(use);
}

/// Moves to the next place of this use in the record; uses in between were skipped in this step.
void UseOrder::find(const Use& use) {
  const auto& places = recorded_at_[use.unit];
  for (auto at = std::lower_bound(places.begin(), places.end(), cursor_); at != places.end();
       ++at) {
    if (recorded_[*at].phase != use.phase) continue;
    cursor_ = *at + 1;
    return;
  }
  lost_ = true;
}

void UseOrder::end_step() {
  if (current_.empty()) return;
  const bool as_recorded =
      !lost_ && cursor_ == recorded_.size() && current_.size() == recorded_.size();
  std::swap(recorded_, current_);
  current_.clear();
  cursor_ = 0;
  last_ = {kNever, Phase::forward};
  lost_ = false;
  if (as_recorded) return;
  for (auto& places : recorded_at_) places.clear();
  for (size_t i = 0; i < recorded_.size(); ++i) recorded_at_[recorded_[i].unit].push_back(i);
}

std::optional<size_t> UseOrder::next(size_t distance) const {
  const size_t at = cursor_ + distance;
  if (lost_ || cursor_ == 0 || at >= recorded_.size() ||
      recorded_[at].phase != recorded_[cursor_ - 1].phase)
    return std::nullopt;
  return recorded_[at].unit;
}

size_t UseOrder::next_use(size_t unit) const {
  if (lost_) return kNever;
  const auto& places = recorded_at_[unit];
  const auto at = std::lower_bound(places.begin(), places.end(), cursor_);
  return at == places.end() ? kNever : *at - cursor_;
}

}  // namespace tessera::fsdp
