#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera {
namespace detail {

/// `text` with its control characters as escapes (\x1b), except for newlines and tabs. A terminal
/// obeys control characters, and what() ends at a zero byte.
inline std::string printable(const std::string& text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string result;
  result.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    // In UTF-8, C2 80 to C2 9F are control characters too.
    const bool two_bytes = byte == 0xc2 && next >= 0x80 && next < 0xa0;
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f;
    if (!two_bytes && !control) {
      result += text[i];
      continue;
    }
    const auto code = two_bytes ? next : byte;
    result += {'\\', 'x', kHex[code >> 4], kHex[code & 15]};
    i += two_bytes ? 1 : 0;
  }
  return result;
}

}  // namespace detail

/// Base class of all errors that the library throws: UsageError and BrokenWorldError. Control
/// characters of the message (of a config's value, for example) become escapes. See docs/errors.md.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(detail::printable(message)) {}
};

/// The caller's mistake: a wrong option, file, shape or order of calls. The message names the
/// component, the parameter, file or option, the rank if ranks can differ, the value, and the
/// expected value. If other ranks would otherwise wait for this one, they throw too. The object
/// that threw is unchanged by the call.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A peer died, left, or did not arrive in time. The process group cannot be used any more: end the
/// program and start again from the last checkpoint.
class BrokenWorldError : public Error {
 public:
  /// `ranks`: the ranks of the group that caused the failure, ascending; empty when unknown.
  BrokenWorldError(const std::string& message, std::vector<int> ranks)
      : Error(message), ranks_(std::move(ranks)) {}

  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int> ranks_;
};

}  // namespace tessera
#pragma GCC visibility pop
