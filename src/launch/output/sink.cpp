#include "launch/output/sink.h"

#include <algorithm>
#include <cerrno>

#include <unistd.h>

namespace tessera::launch {
namespace {

constexpr auto kMaxHold = std::chrono::seconds(1);
// A pipe that poll() reports as writable accepts this many bytes without blocking.
constexpr size_t kWriteSize = 4096;
constexpr size_t kRedrawLimit = 4096;

}  // namespace

Sink::Sink(int fd) : fd_(fd), terminal_(isatty(fd) == 1) {}

void Sink::pass(std::string_view bytes) {
  if (closed_ || bytes.empty()) return;
  settled_ = false;
  const size_t newline = bytes.find('\n');
  remember_unfinished(bytes);
  if (waiting_.empty() || newline == std::string_view::npos) return put(bytes);
  put(bytes.substr(0, newline + 1));
  for (const std::string& text : waiting_) put(text);
  waiting_.clear();
  put(bytes.substr(newline + 1));
}

void Sink::line(std::string_view text) {
  if (closed_) return;
  if (settled_) break_line();
  if (unfinished_.empty()) {
    put(text);
    put("\n");
  } else if (terminal_) {
    put("\r\x1b[K");
    put(text);
    put("\n");
    put(unfinished_);
  } else {
    if (waiting_.empty()) waiting_since_ = Clock::now();
    waiting_.push_back(std::string(text) + "\n");
  }
}

void Sink::urgent_line(std::string_view text) {
  if (!terminal_) break_line();
  line(text);
}

void Sink::remember_unfinished(std::string_view bytes) {
  const size_t newline = bytes.rfind('\n');
  if (newline != std::string_view::npos) {
    unfinished_.clear();
    bytes.remove_prefix(newline + 1);
  }
  unfinished_.append(bytes);
  // Text before the last carriage return has been overwritten, unless the return is the last
  // character.
  if (unfinished_.size() > 1) {
    const size_t back = unfinished_.rfind('\r', unfinished_.size() - 2);
    if (back != std::string::npos) unfinished_.erase(0, back + 1);
  }
  if (unfinished_.size() > kRedrawLimit) unfinished_.erase(0, unfinished_.size() - kRedrawLimit);
}

void Sink::write_some() {
  const size_t size = std::min(kWriteSize, queue_.size() - written_);
  const ssize_t put_out = write(fd_, queue_.data() + written_, size);
  if (put_out < 0) {
    if (errno == EINTR || errno == EAGAIN) return;
    closed_ = true;
    error_ = errno;
    queue_.clear();
    waiting_.clear();
    written_ = 0;
    return;
  }
  written_ += put_out;
  if (written_ == queue_.size()) {
    queue_.clear();
    written_ = 0;
  } else if (written_ > kFull) {
    queue_.erase(0, written_);
    written_ = 0;
  }
}

int Sink::take_error() {
  if (error_ == 0 || reader_gone() || error_taken_) return 0;
  error_taken_ = true;
  return error_;
}

std::optional<Clock::time_point> Sink::deadline() const {
  if (waiting_.empty()) return std::nullopt;
  return waiting_since_ + kMaxHold;
}

void Sink::tick(Clock::time_point now) {
  if (!waiting_.empty() && now >= waiting_since_ + kMaxHold) break_line();
}

void Sink::settle() {
  settled_ = true;
  if (!waiting_.empty()) break_line();
}

void Sink::break_line() {
  if (closed_ || unfinished_.empty()) return;
  put("\n");
  unfinished_.clear();
  for (const std::string& text : waiting_) put(text);
  waiting_.clear();
}

}  // namespace tessera::launch
