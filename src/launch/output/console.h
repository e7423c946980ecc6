#pragma once

#include <memory>
#include <string>
#include <vector>

#include "launch/output/sink.h"

namespace tessera::launch {

/// The launcher's standard output and error. They share one Sink if both are the same file.
class Console {
 public:
  /// `command` is the prefix of the console's own messages.
  explicit Console(std::string command);

  Sink& out() { return *out_; }
  Sink& err() { return *err_; }
  /// True if standard output and error are the same file.
  bool merged() const { return out_ == err_; }
  std::vector<Sink*> sinks() const;
  bool pending() const { return out_->pending() || err_->pending(); }
  /// Writes a line of the launcher itself to standard error.
  void say(const std::string& text) { err_->urgent_line(text); }
  /// Writes a part of the queue of a sink that poll() reports as writable. Reports an error of
  /// standard output once.
  void write_some(Sink& sink);
  /// Writes all queued output; blocks, at most for `most`. Returns false if `interrupt` (a
  /// descriptor, or -1) became readable first.
  bool flush(int interrupt, std::chrono::milliseconds most = std::chrono::seconds(1));

 private:
  std::string command_;
  std::shared_ptr<Sink> out_, err_;
};

}  // namespace tessera::launch
