#pragma once

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config.h"
#include "train/parallel.h"

namespace tessera::train {

/// One line of the log.
struct StepRecord {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  double ms = 0;
  double tokens_per_s = 0;
};

/// What a run says: lines on standard output, a progress bar below them on a terminal (or where TESSERA_TTY=1, which
/// our launcher sets when it passes this rank's output on to one), and the JSON lines of `train.log`. Exists on rank 0
/// only.
class Reporter {
 public:
  /// Throws UsageError when the log cannot be opened.
  explicit Reporter(const Config& config);
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  void line(const std::string& text);
  /// Throws Error when the log cannot be written.
  void step(const StepRecord& record);
  /// `step`: the number of steps done.
  void evaluation(int64_t step, double loss, const std::optional<double>& bigram);
  void memory_table(const std::vector<MemoryUse>& ranks, const MemoryUse& unsharded);

 private:
  void draw_bar();
  void clear_bar();

  const Config& config_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> log_;
  bool terminal_;
  bool bar_drawn_ = false;
  int64_t done_ = 0;
  double seconds_ = 0;  // of the steps done
};

}  // namespace tessera::train
