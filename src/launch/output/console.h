#pragma once

#include <memory>
#include <string>
#include <vector>

#include "launch/output/sink.h"

namespace tessera::launch {

/// The launcher's own output: standard output and error, one Sink when both are the same file.
class Console {
 public:
  /// `command` stands in front of the console's own messages.
  explicit Console(std::string command);

  Sink& out() { return *out_; }
  Sink& err() { return *err_; }
  bool merged() const { return out_ == err_; }
  std::vector<Sink*> sinks() const;
  /// A line of the launcher itself, on standard error.
  void say(const std::string& text) { err_->urgent_line(text); }
  /// Writes a part of what is queued for a sink that poll() calls writable.
  void write_some(Sink& sink);
  /// Writes what is queued. False: `interrupt` (a descriptor, or -1) became readable first.
  bool flush(int interrupt);

 private:
  std::string command_;
  std::shared_ptr<Sink> out_, err_;
};

}  // namespace tessera::launch
