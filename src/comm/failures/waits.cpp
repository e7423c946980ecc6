#include "comm/failures/waits.h"

#include <chrono>
#include <string>
#include <thread>

namespace tessera::comm {
namespace {

std::string key(int rank) { return "waited/" + std::to_string(rank); }

/// A rank that the store answers takes its note back at once.
template <class Condition>
bool persists(const Condition& condition) {
  if (!condition()) return false;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  return condition();
}

}  // namespace

Waits::Waits(const World& world)
    : store_(store_of_start(world)),
      rank_(world.world_ranks[world.rank]),
      size_(world.start_group.size),
      members_(world.world_ranks) {}

void Waits::note(const std::vector<int>& missing, int64_t change) const {
  try {
    for (const int member : missing) store_->add(key(members_[member]), change);
  } catch (...) {
    // The rank that serves the store has ended.
  }
}

bool Waits::on_this_rank() const {
  return persists([this] { return count(rank_) > 0; });
}

bool Waits::on_any() const {
  return persists([this] {
    for (int rank = 0; rank < size_; ++rank)
      if (count(rank) > 0) return true;
    return false;
  });
}

int64_t Waits::count(int rank) const {
  try {
    return store_->check({key(rank)}) ? store_->add(key(rank), 0) : 0;
  } catch (...) {
    return 0;  // the rank that serves the store has ended
  }
}

}  // namespace tessera::comm
