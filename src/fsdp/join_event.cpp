#include "fsdp/join_event.h"

#include <cstring>

#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

using Values = std::vector<int64_t>;

Values values_of(const ForwardBegins& event) { return {event.full_precision}; }
Values values_of(const ForwardEnds&) { return {}; }
Values values_of(const UnitsUsed& event) {
  Values values{static_cast<int64_t>(event.phase)};
  values.insert(values.end(), event.units.begin(), event.units.end());
  return values;
}
Values values_of(const FirstGradient& event) {
  return {event.sync, static_cast<int64_t>(event.flat)};
}
Values values_of(const GradientsReduced& event) {
  Values values{static_cast<int64_t>(event.flat), static_cast<int64_t>(event.forwards)};
  values.insert(values.end(), event.used.begin(), event.used.end());
  return values;
}
Values values_of(const BackwardEnds& event) { return {event.reduced}; }

void read(ForwardBegins& event, const Values& values) { event.full_precision = values.at(0); }
void read(ForwardEnds&, const Values&) {}
void read(UnitsUsed& event, const Values& values) {
  event.phase = static_cast<Phase>(values.at(0));
  event.units.assign(values.begin() + 1, values.end());
}
void read(FirstGradient& event, const Values& values) {
  event.sync = values.at(0);
  event.flat = static_cast<size_t>(values.at(1));
}
void read(GradientsReduced& event, const Values& values) {
  event.flat = static_cast<size_t>(values.at(0));
  event.forwards = static_cast<uint64_t>(values.at(1));
  event.used.assign(values.begin() + 2, values.end());
}
void read(BackwardEnds& event, const Values& values) { event.reduced = values.at(0); }

template <size_t Kind = 0>
JoinEvent event_of_kind(size_t kind, const Values& values) {
  if constexpr (Kind < std::variant_size_v<JoinEvent>) {
    if (kind != Kind) return event_of_kind<Kind + 1>(kind, values);
    std::variant_alternative_t<Kind, JoinEvent> event;
    read(event, values);
    return event;
  } else {
    throw Error("FullyShardedDataParallel: join: unknown event " + std::to_string(kind));
  }
}

}  // namespace

std::string to_bytes(const JoinEvent& event) {
  auto values = std::visit([](const auto& each) { return values_of(each); }, event);
  values.insert(values.begin(), static_cast<int64_t>(event.index()));
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t)};
}

JoinEvent event_from_bytes(std::string_view bytes) {
  Values values(bytes.size() / sizeof(int64_t));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(int64_t));
  const auto kind = static_cast<size_t>(values.at(0));
  values.erase(values.begin());
  return event_of_kind(kind, values);
}

}  // namespace tessera::fsdp
