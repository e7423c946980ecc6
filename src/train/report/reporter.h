#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/train.h"
#include "tessera/train/config.h"
#include "train/report/log_files.h"
#include "train/report/records.h"

namespace tessera::train {

/// The number of steps of a run that has no end.
constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

/// For a run with train.log_every 0, which prints nothing: warnings go to standard error.
void say_without_output(const std::string& text);

/// The output of a run: lines on standard output, a progress bar below them on a terminal (or with
/// TESSERA_TTY=1, which the launcher sets when it forwards this rank's output to a terminal), and
/// the JSON lines of `train.log` and of the events beside it. Exists on rank 0 only.
class Reporter {
 public:
  using Listener = std::function<void(const std::string& json)>;

  /// Removes lines of the log from `first_step` on, which a resumed run writes again. Throws
  /// UsageError when the log cannot be read or opened.
  Reporter(const Config& config, int64_t first_step);
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  /// `listener` gets every record from now on, also where there is no log.
  void set_listener(Listener listener) { listener_ = std::move(listener); }
  void line(const std::string& text);
  /// Prints the line of a step and draws the progress bar.
  void step(const StepRecord& record, int64_t steps);
  /// Writes a line to the log. Throws Error when it cannot be written.
  void log(const StepRecord& record);
  /// Replaces the last line of the log, which is of the same step.
  void log_again(const StepRecord& record);
  /// Writes an event; `step`: the number of steps done. Adds its name and the time to `event`.
  void event(const std::string& name, int64_t step, nlohmann::ordered_json event);
  /// As event(), with the communication so far, if the last event is 10 s or more ago.
  void progress(int64_t step, const CommStats& communication);
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
  EventLog events_;
  Listener listener_;
  bool terminal_;
  bool bar_drawn_ = false;
  int64_t done_ = 0, steps_ = 0, timed_ = 0;
  std::chrono::steady_clock::time_point last_event_{};
  double seconds_ = 0;  // total time of the timed steps
  int64_t samples_ = 0, tokens_ = 0;
};

}  // namespace tessera::train
