#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/pickle/allowed_names.h"

namespace tessera::pickle {

/// Writes a pickle of protocol 2, as torch.save does, without a memo. Each function appends one
/// value, or begins or ends a container. Keys and values of dicts take turns.
class PickleWriter {
 public:
  void none() { text_ += 'N'; }
  void boolean(bool value) { text_ += value ? '\x88' : '\x89'; }
  void integer(int64_t value);
  void real(double value);
  void text(std::string_view value);  // UTF-8

  void begin_dict() { text_ += "}("; }
  void begin_ordered_dict();
  void end_dict() { text_ += 'u'; }
  void begin_list() { text_ += "]("; }
  void end_list() { text_ += 'e'; }
  void begin_tuple() { text_ += '('; }
  void end_tuple() { text_ += 't'; }

  /// A contiguous tensor that is all of the storage `key`.
  void tensor(const DtypeName& dtype, std::string_view key, const std::vector<int64_t>& shape);

  /// The whole pickle of the one value that was written.
  std::string finish() const { return "\x80\x02" + text_ + "."; }

 private:
  void global(std::string_view module, std::string_view name);
  void little_endian(uint64_t value, int bytes);

  std::string text_;
};

}  // namespace tessera::pickle
