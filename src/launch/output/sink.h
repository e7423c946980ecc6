#pragma once

#include <cerrno>
#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::launch {

using Clock = std::chrono::steady_clock;

/// One destination of console output, shared by all that write to the same file. Two kinds of text
/// arrive: bytes passed on as they are (rank 0), and whole lines (the others and the launcher). A
/// line never lands inside an unfinished line of the passed bytes: on a terminal it is put above it
/// (the unfinished line, say a progress bar, is drawn again below); elsewhere it waits for the end
/// of that line, and after a second a newline is put in. Writing never blocks the caller.
class Sink {
 public:
  explicit Sink(int fd);

  void pass(std::string_view bytes);
  void line(std::string_view text);
  /// A line that does not wait: an unfinished line elsewhere than on a terminal gets a newline at
  /// once.
  void urgent_line(std::string_view text);

  int fd() const { return fd_; }
  bool terminal() const { return terminal_; }
  bool wants_write() const { return !closed_ && written_ < queue_.size(); }
  /// Enough is queued: its writers wait.
  bool full() const { return !closed_ && queue_.size() - written_ > kFull; }
  /// A write has failed; what comes is dropped.
  bool closed() const { return closed_; }
  /// The reader of a pipe or socket has gone, and its writers shall see it too. Any other failure
  /// (a full disk) is not theirs.
  bool reader_gone() const { return error_ == EPIPE; }
  /// The errno of a failed write other than a gone reader's, once; else 0.
  int take_error();

  /// Writes a part, after poll() said that the descriptor takes some.
  void write_some();
  /// When held() lines lose patience, if any wait.
  std::optional<Clock::time_point> deadline() const;
  void tick(Clock::time_point now);
  /// No bytes are passed any more: an unfinished line gets its newline when something follows it.
  void settle();

 private:
  static constexpr size_t kFull = 1 << 20;

  void put(std::string_view text) { queue_.append(text); }
  void remember_unfinished(std::string_view bytes);
  /// Ends the unfinished line and puts what waits for that.
  void break_line();

  int fd_;
  bool terminal_;
  bool closed_ = false;
  int error_ = 0;
  bool error_taken_ = false;
  bool settled_ = false;
  std::string queue_;
  size_t written_ = 0;
  std::string unfinished_;  ///< What stands on the last line of passed bytes, as far as it is
                            ///< needed to draw it again.
  std::deque<std::string> waiting_;
  Clock::time_point waiting_since_;
};

}  // namespace tessera::launch
