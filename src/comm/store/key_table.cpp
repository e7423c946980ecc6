#include "comm/store/key_table.h"

#include <algorithm>
#include <charconv>

namespace tessera::comm {
namespace {

StoreMessage done() { return {static_cast<uint8_t>(Reply::done), {}}; }
StoreMessage done(std::string result) {
  return {static_cast<uint8_t>(Reply::done), {std::move(result)}};
}
StoreMessage refused(std::string reason) {
  return {static_cast<uint8_t>(Reply::refused), {std::move(reason)}};
}

std::optional<int64_t> whole_number(const std::string& text) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return value;
}

/// The number of parts that a request must have; nullopt: any number, or no such request.
std::optional<size_t> parts_of(Request request) {
  switch (request) {
    case Request::set:
    case Request::add:
      return 2;
    case Request::get:
    case Request::delete_key:
      return 1;
    case Request::compare_set:
      return 3;
    case Request::count_keys:
      return 0;
    default:
      return std::nullopt;
  }
}

}  // namespace

bool KeyTable::has_all(const std::vector<std::string>& keys) const {
  return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return values_.count(key); });
}

StoreMessage KeyTable::add(const std::string& key, const std::string& amount) {
  const auto found = values_.find(key);
  const auto before = found == values_.end() ? 0 : whole_number(found->second);
  const auto more = whole_number(amount);
  int64_t sum = 0;
  if (!before || !more || __builtin_add_overflow(*before, *more, &sum))
    return refused("add: the value of the key is no whole number, or the sum is too large");
  ++version_;
  return done(values_[key] = std::to_string(sum));
}

const std::string& KeyTable::compare_set(const StoreMessage& request) {
  const auto &key = request.parts[0], &expected = request.parts[1], &wanted = request.parts[2];
  const auto found = values_.find(key);
  if (found == values_.end() && !expected.empty()) return expected;
  if (found != values_.end() && found->second != expected) return found->second;
  ++version_;
  return values_[key] = wanted;
}

std::optional<StoreMessage> KeyTable::answer(const StoreMessage& request) {
  const auto kind = static_cast<Request>(request.code);
  const auto& parts = request.parts;
  if (const auto count = parts_of(kind); count && *count != parts.size())
    return refused("a request with a wrong number of parts");
  switch (kind) {
    case Request::set:
      values_[parts[0]] = parts[1];
      ++version_;
      return done();
    case Request::get: {
      const auto found = values_.find(parts[0]);
      if (found == values_.end()) return std::nullopt;
      return done(found->second);
    }
    case Request::add:
      return add(parts[0], parts[1]);
    case Request::check:
      return done(has_all(parts) ? "1" : "0");
    case Request::wait:
      if (!has_all(parts)) return std::nullopt;
      return done();
    case Request::compare_set:
      return done(compare_set(request));
    case Request::delete_key: {
      const bool existed = values_.erase(parts[0]) > 0;
      if (existed) ++version_;
      return done(existed ? "1" : "0");
    }
    case Request::count_keys:
      return done(std::to_string(values_.size()));
  }
  return refused("an unknown request");
}

}  // namespace tessera::comm
