#include "launch/output/line_reader.h"

namespace tessera::launch {
namespace {

constexpr size_t kMaxLine = 64 << 10;

/// The text that a terminal would show of the line: the text after the last carriage return,
/// ignoring carriage returns at the end.
std::string visible(std::string line) {
  while (!line.empty() && line.back() == '\r') line.pop_back();
  const size_t back = line.rfind('\r');
  return back == std::string::npos ? line : line.substr(back + 1);
}

}  // namespace

void LineReader::feed(std::string_view bytes, const OnLine& on_line) {
  while (!bytes.empty()) {
    const size_t newline = bytes.find('\n');
    const size_t space = kMaxLine - current_.size();
    const size_t size = std::min(newline == std::string_view::npos ? bytes.size() : newline, space);
    current_.append(bytes.substr(0, size));
    bytes.remove_prefix(size);
    if (!bytes.empty() && bytes[0] == '\n') {
      bytes.remove_prefix(1);
      complete(on_line);
    } else if (current_.size() == kMaxLine) {
      current_ = visible(std::move(current_));
      if (current_.size() == kMaxLine) complete(on_line);
    }
  }
}

void LineReader::finish(const OnLine& on_line) {
  if (!current_.empty()) complete(on_line);
}

void LineReader::complete(const OnLine& on_line) {
  std::string line = visible(std::move(current_));
  current_.clear();
  on_line(line);
  kept_.push_back(std::move(line));
  if (kept_.size() > kKept) kept_.pop_front();
}

std::deque<std::string> LineReader::last_lines() const {
  std::deque<std::string> lines = kept_;
  if (!current_.empty()) lines.push_back(visible(current_));
  if (lines.size() > kKept) lines.pop_front();
  return lines;
}

}  // namespace tessera::launch
