#include "launch/output/sink.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace tessera::launch {
namespace {

constexpr auto kMaxHold = std::chrono::seconds(1);
constexpr auto kRetry = std::chrono::milliseconds(20);
// The ranks do not wait for a reader that reads less in a second.
constexpr size_t kLeastRead = 64 << 10;
// A pipe that poll() reports as writable accepts this many bytes without blocking.
constexpr size_t kWriteSize = 4096;
constexpr size_t kRedrawLimit = 4096;

}  // namespace

Sink::Sink(int fd, std::string command)
    : fd_(fd), command_(std::move(command)), terminal_(isatty(fd) == 1) {
  // A terminal that poll() reports as writable may block a write. O_NONBLOCK on `fd` itself would
  // change the terminal of the shell, too.
  if (terminal_)
    own_ = Fd(open(("/proc/self/fd/" + std::to_string(fd)).c_str(),
                   O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

void Sink::put(std::string_view text) {
  if (slow_.drops) {
    slow_.dropped += text.size();
  } else if (!text.empty()) {
    queue_.append(text);
    last_ = text.back();
    measure();
  }
}

void Sink::measure() {
  const size_t left = queue_.size() - written_;
  if (left <= kFull) {
    slow_.full_since.reset();
  } else if (!slow_.full_since) {
    slow_.full_since = Clock::now();
    slow_.read = 0;
  }
  if (!slow_.drops || left > kFull / 2) return;
  slow_.drops = false;
  if (closed_) return;
  unfinished_.clear();
  if (last_ != '\n') put("\n");
  put(command_ + ": " + std::to_string(std::exchange(slow_.dropped, 0)) +
      " bytes of output are missing here, because the output was not read\n");
}

void Sink::pass(std::string_view bytes) {
  if (closed_ || bytes.empty()) return;
  settled_ = false;
  const size_t newline = bytes.find('\n');
  remember_unfinished(bytes);
  if (waiting_.lines.empty() || newline == std::string_view::npos) return put(bytes);
  put(bytes.substr(0, newline + 1));
  for (const std::string& text : waiting_.lines) put(text);
  waiting_.lines.clear();
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
    if (waiting_.lines.empty()) waiting_.since = Clock::now();
    waiting_.lines.push_back(std::string(text) + "\n");
  }
}

void Sink::urgent_line(std::string_view text) {
  const bool drops = std::exchange(slow_.drops, false);
  if (drops && last_ != '\n') put("\n");
  if (drops || !terminal_) break_line();
  line(text);
  slow_.drops = drops && slow_.full_since;
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
  const ssize_t put_out = write(own_ ? own_.get() : fd_, queue_.data() + written_, size);
  if (put_out < 0) {
    // A terminal with room for one byte is writable, but does not take a newline.
    if (errno == EAGAIN) retry_at_ = Clock::now() + kRetry;
    if (errno == EINTR || errno == EAGAIN) return;
    closed_ = true;
    error_ = errno;
    queue_.clear();
    waiting_.lines.clear();
    written_ = 0;
    measure();
    return;
  }
  written_ += put_out;
  slow_.read += put_out;
  if (slow_.full_since && slow_.read >= kLeastRead) {
    slow_.full_since = Clock::now();
    slow_.read = 0;
  }
  if (written_ == queue_.size()) {
    queue_.clear();
    written_ = 0;
  } else if (written_ > kFull) {
    queue_.erase(0, written_);
    written_ = 0;
  }
  measure();
}

int Sink::take_error() {
  if (error_ == 0 || reader_gone() || error_taken_) return 0;
  error_taken_ = true;
  return error_;
}

std::optional<Clock::time_point> Sink::deadline() const {
  auto first = Clock::time_point::max();
  if (!waiting_.lines.empty()) first = waiting_.since + kMaxHold;
  if (full()) first = std::min(first, *slow_.full_since + kMaxHold);
  if (pending() && !wants_write()) first = std::min(first, retry_at_);
  return first == Clock::time_point::max() ? std::nullopt : std::optional(first);
}

void Sink::tick(Clock::time_point now) {
  if (!waiting_.lines.empty() && now >= waiting_.since + kMaxHold) break_line();
  if (full() && now >= *slow_.full_since + kMaxHold) slow_.drops = true;
}

void Sink::settle() {
  settled_ = true;
  if (!waiting_.lines.empty()) break_line();
}

void Sink::break_line() {
  if (closed_ || unfinished_.empty()) return;
  put("\n");
  unfinished_.clear();
  for (const std::string& text : waiting_.lines) put(text);
  waiting_.lines.clear();
}

}  // namespace tessera::launch
