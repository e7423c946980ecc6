#include "tessera/detail/running_collectives.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "comm/execution/running_scope.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {
namespace {

constexpr int kSlots = 32;

enum SlotState : int { kFree, kWritten, kListed, kRead };

}  // namespace

struct RunningScope::Slot {
  std::atomic<int> state{kFree};
  std::atomic<bool> begun_by_all{false};
  detail::RunningCollective collective;
  const World* world = nullptr;
  const ShmTransport* transport = nullptr;  // null: not in shared memory
};

RunningScope::Slot* RunningScope::slots() noexcept {
  static std::array<Slot, kSlots> all;
  return all.data();
}

RunningScope::RunningScope(const World& world, const Transport& transport, const OpHeader& header,
                           const std::string& tag) noexcept {
  for (Slot* slot = slots(); slot != slots() + kSlots && slot_ == nullptr; ++slot) {
    int expected = kFree;
    if (slot->state.compare_exchange_strong(expected, kWritten)) slot_ = slot;
  }
  if (slot_ == nullptr) return;
  detail::RunningCollective& collective = slot_->collective;
  collective.number = header.sequence;
  collective.operation = op_name(header.op);
  collective.numel = header.numel;
  collective.size = world.size;
  const size_t length = std::min(tag.size(), collective.tag.size() - 1);
  std::memcpy(collective.tag.data(), tag.data(), length);
  collective.tag[length] = 0;
  slot_->world = &world;
  slot_->transport = dynamic_cast<const ShmTransport*>(&transport);
  slot_->begun_by_all = false;
  slot_->state = kListed;
}

RunningScope::~RunningScope() {
  if (slot_ == nullptr) return;
  int expected = kListed;
  while (!slot_->state.compare_exchange_weak(expected, kFree)) {
    expected = kListed;  // a reader is copying it
    std::this_thread::yield();
  }
}

void RunningScope::begun_by_all() noexcept {
  if (slot_ != nullptr) slot_->begun_by_all = true;
}

int list_running(detail::RunningCollective* out, int most) noexcept {
  int count = 0;
  for (auto* slot = RunningScope::slots(); slot != RunningScope::slots() + kSlots; ++slot) {
    int expected = kListed;
    if (count == most || !slot->state.compare_exchange_strong(expected, kRead)) continue;
    detail::RunningCollective& copy = out[count++];
    copy = slot->collective;
    copy.begun_by_all = slot->begun_by_all;
    copy.late_count = 0;
    for (int r = 0; slot->transport != nullptr && r < copy.size; ++r)
      if (copy.late_count < copy.kMostLate && slot->transport->is_late(r))
        copy.late[copy.late_count++] = slot->world->world_ranks[r];
    slot->state = kListed;
  }
  return count;
}

}  // namespace tessera::comm

namespace tessera::detail {

int running_collectives(RunningCollective* out, int most) noexcept {
  return comm::list_running(out, most);
}

}  // namespace tessera::detail
