#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/pickle/pickle_values.h"
#include "tessera/error.h"

namespace tessera::pickle {

inline constexpr size_t kMaxValueBytes = 48 << 20;  // memory of the values of one pickle

/// Reads the bytes of a pickle in their order. Errors begin with `where`.
class Text {
 public:
  Text(const std::string& where, const std::string& pickle) : where_(where), pickle_(pickle) {}

  size_t at() const { return at_; }
  [[noreturn]] void refuse(const std::string& reason) const {
    throw UsageError(fmt::format("{}is no sound pickle: {}, at byte {}", where_, reason, at_));
  }

  const char* take(uint64_t bytes) {
    if (bytes > pickle_.size() - at_) refuse("it ends too early");
    const char* from = pickle_.data() + at_;
    at_ += bytes;
    return from;
  }
  unsigned char byte() { return static_cast<unsigned char>(*take(1)); }
  uint64_t number(size_t bytes) {
    const char* from = take(bytes);
    uint64_t value = 0;
    for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(from[i]);
    return value;
  }
  Value piece(Kind kind, uint64_t bytes) {
    Value value;
    value.kind = kind;
    value.piece = {static_cast<uint32_t>(at_), static_cast<uint32_t>(bytes)};
    take(bytes);
    return value;
  }
  Value line() {
    const size_t end = pickle_.find('\n', at_);
    if (end == std::string::npos) refuse("it ends too early");
    const Value value = piece(Kind::text, end - at_);
    ++at_;
    return value;
  }

 private:
  const std::string& where_;
  const std::string& pickle_;
  size_t at_ = 0;
};

/// The stack of a pickle's machine, with its marks, and the nodes that its values need. Bounds
/// their memory.
class Stack {
 public:
  Stack(const Text& text, Values& values) : text_(text), values_(values) {}

  bool empty() const { return stack_.empty() && marks_.empty(); }
  void charge(size_t bytes) {
    charged_ += bytes;
    if (charged_ > kMaxValueBytes)
      text_.refuse(fmt::format("its values take more than {} bytes", kMaxValueBytes));
  }
  void push(const Value& value) {
    if (stack_.size() == stack_.capacity()) charge(sizeof(Value) * (stack_.size() + 1));
    stack_.push_back(value);
  }
  void push_integer(Kind kind, int64_t integer) {
    Value value;
    value.kind = kind;
    value.integer = integer;
    push(value);
  }
  Value node(Kind kind, std::vector<Value> items) {
    charge(sizeof(std::vector<Value>) + items.capacity() * sizeof(Value) + 16);
    Value value;
    value.kind = kind;
    value.node = static_cast<uint32_t>(values_.nodes.size());
    values_.nodes.push_back(std::move(items));
    return value;
  }
  Value pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) text_.refuse("its stack is empty");
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  std::vector<Value> pop_to_mark() {
    if (marks_.empty()) text_.refuse("a mark is missing");
    std::vector<Value> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                             stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  void push_tuple(size_t count) {
    std::vector<Value> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push(node(Kind::tuple, std::move(items)));
  }
  const Value& top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) text_.refuse("its stack is empty");
    return stack_.back();
  }
  void add(Kind kind, const std::vector<Value>& items) {
    if (top().kind != kind && top().kind != Kind::foreign)
      text_.refuse("it adds items to no " +
                   std::string(kind == Kind::dict ? "dict" : "list or set"));
    if (kind == Kind::dict && items.size() % 2 != 0) text_.refuse("a key has no value");
    auto& to = values_.nodes[top().node];
    const size_t before = to.capacity();
    to.insert(to.end(), items.begin(), items.end());
    charge((to.capacity() - before) * sizeof(Value));
  }
  void add_marked(Kind kind) {
    const auto items = pop_to_mark();
    add(kind, items);
  }
  void add_popped(Kind kind, size_t count) {
    std::vector<Value> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    add(kind, items);
  }
  void mark() {
    charge(sizeof(size_t));
    marks_.push_back(stack_.size());
  }

 private:
  const Text& text_;
  Values& values_;
  size_t charged_ = 0;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
};

}  // namespace tessera::pickle
