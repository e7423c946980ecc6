#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace tessera::train {

/// Removes the lines of steps >= `step` and incomplete lines from a log of JSON lines: a resumed
/// run writes the steps after its checkpoint again. Does nothing when the file does not exist.
/// Throws UsageError when it cannot be read or replaced.
void keep_log_before(const std::string& path, int64_t step);

/// The file of a run's events beside its log: starts, checkpoints, memory, communication. A resumed
/// run appends, so that the file has the history of all starts. The caller holds the log's lock.
class EventLog {
 public:
  /// "out/log.jsonl" gives "out/log.events.jsonl".
  static std::string path_beside(const std::string& log);

  /// `append`: keeps the events that the file has.
  void open(const std::string& log, bool append);
  bool opened() const { return file_ != nullptr; }
  /// Appends a line. Events are not needed to train, so a failure is no error: it is returned as a
  /// text ("" otherwise), once, and the file is then closed.
  std::string write(const std::string& line);

 private:
  std::string path_;
  std::string problem_;  // of open()
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, &std::fclose};
};

}  // namespace tessera::train
