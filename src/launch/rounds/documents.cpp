#include "launch/rounds/documents.h"

#include <charconv>
#include <limits>

#include "comm/store/message.h"

namespace tessera::launch {
namespace {

/// Reads the parts of a message in order. A part that is missing or is no number makes it bad.
class Parts {
 public:
  explicit Parts(std::string bytes) {
    good_ = comm::take_message(bytes, message_) == comm::Taken::whole && bytes.empty();
  }
  uint8_t code() const { return message_.code; }
  std::string text() {
    if (next_ < message_.parts.size()) return std::move(message_.parts[next_++]);
    good_ = false;
    return "";
  }
  int number() {
    const std::string digits = text();
    int value = 0;
    const char* const end = digits.data() + digits.size();
    const auto parsed = std::from_chars(digits.data(), end, value);
    good_ = good_ && parsed.ec == std::errc() && parsed.ptr == end;
    return value;
  }
  size_t left() const { return message_.parts.size() - next_; }
  bool good() const { return good_ && left() == 0; }
  void spoil() { good_ = false; }

 private:
  comm::StoreMessage message_;
  size_t next_ = 0;
  bool good_ = false;
};

constexpr auto kLastEnd = static_cast<uint8_t>(NodeDocument::End::followed);
constexpr auto kLastKind = static_cast<uint8_t>(Order::Kind::over);

}  // namespace

std::string NodeDocument::encode() const {
  const auto number = [](int value) { return std::to_string(value); };
  return comm::encode(
      {static_cast<uint8_t>(end),
       {number(node), incarnation, number(beat), host, settings, number(ranks), number(began),
        number(ended), number(cause_known), number(final), text, number(left)}});
}

std::optional<NodeDocument> NodeDocument::decode(std::string bytes) {
  Parts parts(std::move(bytes));
  if (parts.code() > kLastEnd) parts.spoil();
  NodeDocument document;
  document.end = static_cast<End>(parts.code());
  document.node = parts.number();
  document.incarnation = parts.text();
  document.beat = parts.number();
  document.host = parts.text();
  document.settings = parts.text();
  document.ranks = parts.number();
  if (document.ranks < 1) parts.spoil();
  document.began = parts.number();
  document.ended = parts.number();
  document.cause_known = parts.number() != 0;
  document.final = parts.number() != 0;
  document.text = parts.text();
  document.left = parts.number() != 0;
  if (!parts.good()) return std::nullopt;
  return document;
}

int Order::place_of(const NodeDocument& launcher) const {
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i] == launcher.node && incarnations[i] == launcher.incarnation)
      return static_cast<int>(i);
  return -1;
}

std::string Order::encode() const {
  comm::StoreMessage message{static_cast<uint8_t>(kind), {std::to_string(round), text, settings}};
  for (size_t i = 0; i < nodes.size(); ++i) {
    message.parts.push_back(std::to_string(nodes[i]));
    message.parts.push_back(incarnations[i]);
    message.parts.push_back(std::to_string(ranks[i]));
  }
  return comm::encode(message);
}

std::optional<Order> Order::decode(std::string bytes) {
  Parts parts(std::move(bytes));
  if (parts.code() > kLastKind) parts.spoil();
  Order order;
  order.kind = static_cast<Kind>(parts.code());
  order.round = parts.number();
  order.text = parts.text();
  order.settings = parts.text();
  int64_t world = 0;
  while (parts.left() >= 3) {
    order.nodes.push_back(parts.number());
    order.incarnations.push_back(parts.text());
    order.ranks.push_back(parts.number());
    world += order.ranks.back();
    if (order.ranks.back() < 1 || world > std::numeric_limits<int>::max()) parts.spoil();
  }
  if (!parts.good()) return std::nullopt;
  return order;
}

}  // namespace tessera::launch
