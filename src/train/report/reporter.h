#pragma once

#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/train.h"
#include "tessera/train/config.h"

namespace tessera::train {

/// One line of the log.
struct StepRecord {
  using Figures = std::vector<std::pair<std::string, double>>;

  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  double lr = 0;
  double ms = 0;
  int64_t samples = 0;  ///< of all ranks
  int64_t tokens = 0;   ///< likewise; 0: samples are no token sequences
  double epoch = 0;
  double loss_scale = 1;
  Figures figures;     ///< what else the model gave
  Figures evaluation;  ///< of the evaluation after this step; empty: there was none
};

/// What a run says: lines on standard output, a progress bar below them on a terminal (or where
/// TESSERA_TTY=1, which our launcher sets when it passes this rank's output on to one), and the
/// JSON lines of `train.log`. Exists on rank 0 only.
class Reporter {
 public:
  /// Lines of the log from `first_step` on are dropped: a resumed run writes them again. Throws
  /// UsageError when the log cannot be read or opened.
  Reporter(const Config& config, int64_t first_step);
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  void line(const std::string& text);
  /// The line of a step, and the bar.
  void step(const StepRecord& record, int64_t steps);
  /// Into the log. Throws Error when it cannot be written.
  void log(const StepRecord& record);
  /// In place of the line of that step, the last one.
  void log_again(const StepRecord& record);
  /// `step`: the number of steps done.
  void evaluation(int64_t step, const std::map<std::string, double>& figures,
                  const std::optional<double>& baseline, const std::string& baseline_name);
  void test(const std::map<std::string, double>& figures);
  void memory_table(const std::vector<MemoryUse>& ranks, const MemoryUse& formula,
                    const MemoryUse& unsharded);
  /// Best evaluation, throughput, bytes and calls of communication, seconds waited for data.
  void summary(const TrainResult& result, const CommStats& communication, double waited_for_data);

 private:
  /// Drops lines from `first_step` on and opens the log behind the others.
  void open_log(int64_t first_step);
  void draw_bar();
  void clear_bar();

  const Config& config_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> log_;
  bool terminal_;
  bool bar_drawn_ = false;
  int64_t done_ = 0, steps_ = 0, timed_ = 0;
  double seconds_ = 0;  // of the steps timed
  int64_t samples_ = 0, tokens_ = 0;
};

}  // namespace tessera::train
