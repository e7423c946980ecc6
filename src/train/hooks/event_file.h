#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "train/hooks/histogram.h"

namespace tessera::train {

/// A file of TensorBoard events: TFRecord frames (length, masked CRC-32C of it, data, masked CRC of
/// it) around TensorFlow's protobuf message Event. Only the fields that are needed are written:
/// wall_time 1, step 2, file_version 3, summary 5 {value 1 {tag 1, simple_value 2, histo 5}} and
/// session_log 7 {status 1}. Local.
class EventFile {
 public:
  /// Makes the folder, and in it a file of a new name. TensorBoard then ignores `first_step` and
  /// later steps in earlier files of the folder. Throws Error.
  EventFile(const std::string& folder, int64_t first_step);

  const std::string& path() const { return path_; }
  void scalars(int64_t step, const std::vector<std::pair<std::string, double>>& values);
  void histograms(int64_t step, const std::vector<std::pair<std::string, Histogram>>& values);

 private:
  void write(const std::string& event);

  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, &std::fclose};
};

}  // namespace tessera::train
