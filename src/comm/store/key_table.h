#pragma once

#include <optional>
#include <string>
#include <unordered_map>

#include "comm/store/message.h"

namespace tessera::comm {

/// Codes of requests, with their parts. They work as the functions of c10d::Store of the same
/// names.
enum class Request : uint8_t {
  set = 1,      ///< key, value
  get,          ///< key; waits until the key exists; reply: value
  add,          ///< key, whole number as text; reply: the sum as text
  check,        ///< keys; reply: "1" if all exist, else "0"
  wait,         ///< keys; waits until all exist
  compare_set,  ///< key, expected value, new value; reply: the value after that
  delete_key,   ///< key; reply: "1" if it existed, else "0"
  count_keys,   ///< no parts; reply: the number as text
};

/// Codes of replies.
enum class Reply : uint8_t {
  done = 1,  ///< the result as its part, if there is one
  refused,   ///< the reason
};

/// The keys and values of a store. Not thread-safe.
class KeyTable {
 public:
  /// Executes a request; nullopt if it must be repeated after a change of the table. Any bytes are
  /// allowed; an invalid request is refused.
  std::optional<StoreMessage> answer(const StoreMessage& request);
  /// Grows with every change.
  uint64_t version() const { return version_; }

 private:
  bool has_all(const std::vector<std::string>& keys) const;
  StoreMessage add(const std::string& key, const std::string& amount);
  const std::string& compare_set(const StoreMessage& request);

  std::unordered_map<std::string, std::string> values_;
  uint64_t version_ = 0;
};

}  // namespace tessera::comm
