#pragma once

#include <cerrno>
#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

#include "launch/fd.h"

namespace tessera::launch {

using Clock = std::chrono::steady_clock;

/// One destination of console output, shared by all writers of the same file. It receives bytes
/// that are passed on unchanged (from rank 0) and whole lines (from the other ranks and the
/// launcher). A line is never written inside an unfinished line of the passed bytes. On a terminal
/// it is written above the unfinished line (for example a progress bar), which is then drawn again
/// below. Elsewhere the line waits for the end of the unfinished line, and after 1 s a newline is
/// inserted. Writing never blocks the caller. If the reader of the file does not read, output waits
/// in a queue. When the queue has been full for a second, further output is dropped, except urgent
/// lines. When there is room again, a line says how much is missing.
class Sink {
 public:
  /// `command` is the prefix of that line.
  explicit Sink(int fd, std::string command = "tessera run");

  /// Writes bytes unchanged.
  void pass(std::string_view bytes);
  /// Writes a line; `text` has no newline.
  void line(std::string_view text);
  /// As line(), without waiting: except on a terminal, an unfinished line gets a newline at once.
  void urgent_line(std::string_view text);

  int fd() const { return fd_; }
  bool terminal() const { return terminal_; }
  /// True if output is queued.
  bool pending() const { return !closed_ && written_ < queue_.size(); }
  /// True if poll() is to report when the descriptor is writable.
  bool wants_write() const { return pending() && Clock::now() >= retry_at_; }
  /// True if the queue is so long that writers must wait, at most a second if nobody reads.
  bool full() const { return slow_.full_since && !slow_.drops; }
  /// True if a write has failed. Further output is dropped.
  bool closed() const { return closed_; }
  /// True if the reader of a pipe or socket has ended. The ranks then get SIGPIPE; after any other
  /// failure, such as a full disk, they do not.
  bool reader_gone() const { return error_ == EPIPE; }
  /// The errno of a failed write, unless the reader has ended. Returned once; otherwise 0.
  int take_error();

  /// Writes a part of the queue. Call it when poll() reports the descriptor as writable.
  void write_some();
  /// The latest time for the next tick(); nullopt: no limit.
  std::optional<Clock::time_point> deadline() const;
  /// Writes waiting lines and drops output whose deadline has passed.
  void tick(Clock::time_point now);
  /// Call it when no more bytes will be passed: an unfinished line then gets its newline as soon as
  /// another line follows.
  void settle();

 private:
  static constexpr size_t kFull = 1 << 20;

  struct SlowReader {
    std::optional<Clock::time_point> full_since;  ///< When slow reading began.
    size_t read = 0;                              ///< Bytes since full_since.
    bool drops = false;                           ///< Output is dropped.
    size_t dropped = 0;
  };

  void put(std::string_view text);
  /// Notices that the queue has become full, or has room again.
  void measure();
  void remember_unfinished(std::string_view bytes);
  /// Ends the unfinished line and writes the waiting lines.
  void break_line();

  int fd_;
  Fd own_;  ///< Of a terminal: another descriptor, which never blocks.
  std::string command_;
  bool terminal_;
  bool closed_ = false;
  int error_ = 0;
  bool error_taken_ = false;
  bool settled_ = false;
  std::string queue_;
  size_t written_ = 0;
  char last_ = '\n';  ///< Of all that was queued.
  SlowReader slow_;
  Clock::time_point retry_at_;
  /// The visible end of the unfinished line of passed bytes, as needed to draw it again.
  std::string unfinished_;
  struct {
    std::deque<std::string> lines;
    Clock::time_point since;
  } waiting_;
};

}  // namespace tessera::launch
