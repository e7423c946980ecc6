#include "fsdp/join_leader.h"

#include <cstring>
#include <string>

namespace tessera::fsdp {

void JoinLeader::broadcast_event(Event::Kind kind, c10::ArrayRef<int64_t> values) {
  if (!is_leader()) return;
  std::string text;
  if (world_.rank() == iteration_.first_active) {
    std::vector<int64_t> told{static_cast<int64_t>(kind)};
    told.insert(told.end(), values.begin(), values.end());
    text.assign(reinterpret_cast<const char*>(told.data()), told.size() * sizeof(int64_t));
  }
  world_.broadcast_bytes(text, iteration_.first_active);
}

Event JoinLeader::receive_event() {
  const auto text = world_.broadcast_bytes("", iteration_.first_active);
  std::vector<int64_t> values(text.size() / sizeof(int64_t));
  std::memcpy(values.data(), text.data(), text.size());
  return {static_cast<Event::Kind>(values.at(0)), {values.begin() + 1, values.end()}};
}

}  // namespace tessera::fsdp
