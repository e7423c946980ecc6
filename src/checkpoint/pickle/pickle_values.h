#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

// The values of a pickle. They refer to each other by number and to the pickle's text, so that
// deep, shared and cyclic values cost nothing and are destroyed without recursion.

namespace tessera::pickle {

enum class Kind : uint8_t {
  none,
  boolean,
  integer,
  real,
  text,    // of a string
  opaque,  // bytes, or an integer beyond 64 bits
  global,  // a name of the allow-list: module and name
  tuple,
  list,
  dict,     // keys and values in turn
  storage,  // type, key, number of elements or bytes
  tensor,   // storage, offset, sizes, strides; and a dtype, if the storage has none
  set,
  foreign,  // an object that Tessera does not read: module, name; then arguments, state and items
};

struct Value {
  struct Piece {
    uint32_t begin, bytes;
  };
  Kind kind = Kind::none;
  union {
    int64_t integer = 0;  // also of booleans
    double real;
    Piece piece;    // of text and opaque: where in the pickle
    uint32_t node;  // of all others
  };
};

struct Values {
  std::string pickle;
  std::deque<std::vector<Value>> nodes;
  std::vector<Value> storages;       // in the order of the pickle
  std::vector<Value> tensor_ids;     // tensors that are only a text in the pickle
  std::vector<std::string> foreign;  // "argparse.Namespace": what is foreign, each name once
  Value root;

  const std::vector<Value>& items(const Value& value) const { return nodes[value.node]; }
  std::string_view text(const Value& value) const {
    return std::string_view(pickle).substr(value.piece.begin, value.piece.bytes);
  }
  /// "torch.FloatStorage", of a global or foreign value
  std::string global_name(const Value& value) const {
    return std::string(text(items(value)[0])) + "." + std::string(text(items(value)[1]));
  }
  /// The value of a key of a dict, the last one if there are several; null if there is none.
  const Value* find(const Value& dict, std::string_view key) const {
    const Value* found = nullptr;
    const auto& pairs = items(dict);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2)
      if (pairs[i].kind == Kind::text && text(pairs[i]) == key) found = &pairs[i + 1];
    return found;
  }
};

}  // namespace tessera::pickle
