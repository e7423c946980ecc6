#pragma once

#include <deque>
#include <functional>
#include <string>
#include <string_view>

namespace tessera::launch {

/// Cuts a stream of bytes into lines and remembers the last of them. Of a line that was overwritten
/// by carriage returns the last state counts; a line longer than 64 KiB is cut.
class LineReader {
 public:
  using OnLine = std::function<void(const std::string& line)>;
  static constexpr size_t kKept = 20;

  void feed(std::string_view bytes, const OnLine& on_line);
  /// The stream has ended: what is left is a line.
  void finish(const OnLine& on_line);
  /// The last kKept lines, an unfinished one included.
  std::deque<std::string> last_lines() const;

 private:
  void complete(const OnLine& on_line);

  std::string current_;
  std::deque<std::string> kept_;
};

}  // namespace tessera::launch
