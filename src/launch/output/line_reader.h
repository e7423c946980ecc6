#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>

namespace tessera::launch {

/// Splits a stream of bytes into lines and keeps the last of them. A line that was overwritten by
/// carriage returns counts in its last state. A line longer than 64 KiB is split.
class LineReader {
 public:
  using OnLine = std::function<void(const std::string& line)>;
  static constexpr size_t kKept = 20;

  void feed(std::string_view bytes, const OnLine& on_line);
  /// Completes the unfinished line, if any; call it at the end of the stream.
  void finish(const OnLine& on_line);
  /// The last kKept lines, including an unfinished one.
  std::deque<std::string> last_lines() const;

 private:
  void complete(const OnLine& on_line);

  std::string current_;
  std::deque<std::string> kept_;
};

}  // namespace tessera::launch
