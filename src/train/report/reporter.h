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
  int64_t samples = 0;  ///< over all ranks
  int64_t tokens = 0;   ///< over all ranks; 0: samples are not token sequences
  double epoch = 0;
  double loss_scale = 1;
  Figures figures;     ///< the model's other figures
  Figures evaluation;  ///< figures of the evaluation after this step; empty: none
};

/// The output of a run: lines on standard output, a progress bar below them on a terminal (or with
/// TESSERA_TTY=1, which the launcher sets when it forwards this rank's output to a terminal), and
/// the JSON lines of `train.log`. Exists on rank 0 only.
class Reporter {
 public:
  /// Removes lines of the log from `first_step` on, which a resumed run writes again. Throws
  /// UsageError when the log cannot be read or opened.
  Reporter(const Config& config, int64_t first_step);
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  void line(const std::string& text);
  /// Prints the line of a step and draws the progress bar.
  void step(const StepRecord& record, int64_t steps);
  /// Writes a line to the log. Throws Error when it cannot be written.
  void log(const StepRecord& record);
  /// Replaces the last line of the log, which is of the same step.
  void log_again(const StepRecord& record);
  /// `step`: the number of steps done.
  void evaluation(int64_t step, const std::map<std::string, double>& figures,
                  const std::optional<double>& baseline, const std::string& baseline_name);
  void test(const std::map<std::string, double>& figures);
  void memory_table(const std::vector<MemoryUse>& ranks, const MemoryUse& formula,
                    const MemoryUse& unsharded);
  /// Prints the throughput, the time waited for data, the calls and bytes of communication and the
  /// best evaluation.
  void summary(const TrainResult& result, const CommStats& communication, double waited_for_data);

 private:
  using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

  /// Removes lines from `first_step` on and opens the log for appending.
  void open_log(int64_t first_step);
  File open_locked(const std::string& path) const;
  void draw_bar();
  void clear_bar();

  const Config& config_;
  File log_;
  bool terminal_;
  bool bar_drawn_ = false;
  int64_t done_ = 0, steps_ = 0, timed_ = 0;
  double seconds_ = 0;  // total time of the timed steps
  int64_t samples_ = 0, tokens_ = 0;
};

}  // namespace tessera::train
