#include "fsdp/join/join_event.h"

#include <cstring>
#include <utility>

#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

using Values = std::vector<int64_t>;

struct Writer {
  Values& values;
  void operator()(auto& field) { values.push_back(static_cast<int64_t>(field)); }
  template <class Item>
  void operator()(std::vector<Item>& list) {
    values.insert(values.end(), list.begin(), list.end());
  }
};

struct Reader {
  Values::const_iterator next, end;
  void operator()(auto& field) {
    if (next == end) throw Error("FullyShardedDataParallel: join: an event is too short");
    field = static_cast<std::decay_t<decltype(field)>>(*next++);
  }
  template <class Item>
  void operator()(std::vector<Item>& list) {
    list.assign(next, end);
  }
};

template <size_t... Kinds>
JoinEvent event_of_kind(size_t kind, std::index_sequence<Kinds...> /*all*/) {
  if (kind >= sizeof...(Kinds))
    throw Error("FullyShardedDataParallel: join: unknown event " + std::to_string(kind));
  JoinEvent event;
  ((kind == Kinds ? static_cast<void>(event.emplace<Kinds>()) : void()), ...);
  return event;
}

}  // namespace

std::string to_bytes(JoinEvent event) {
  Values values{static_cast<int64_t>(event.index())};
  std::visit([&](auto& each) { each.each(Writer{values}); }, event);
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t)};
}

JoinEvent event_from_bytes(std::string_view bytes) {
  Values values(bytes.size() / sizeof(int64_t));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(int64_t));
  auto event = event_of_kind(static_cast<size_t>(values.at(0)),
                             std::make_index_sequence<std::variant_size_v<JoinEvent>>());
  std::visit([&](auto& each) { each.each(Reader{values.begin() + 1, values.end()}); }, event);
  return event;
}

}  // namespace tessera::fsdp
