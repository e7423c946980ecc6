#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <sys/types.h>

#include "fuzz/training/story.h"

namespace tessera::fuzz {

/// A child process that runs the cases of the seeds first, first + stride, … below `end`. A case
/// that ends the process by a signal or does not end at all is a finding, too.
class Worker {
 public:
  /// Makes the case of a seed.
  using Source = std::function<Case(uint64_t seed)>;

  /// `patience`: a case that takes longer hangs.
  Worker(Source source, uint64_t first, uint64_t stride, uint64_t end,
         std::chrono::seconds patience);
  ~Worker();
  Worker(const Worker&) = delete;

  struct Report {
    uint64_t seed = 0;
    std::optional<Finding> finding;
  };
  /// Waits until `deadline` for the next case to end. No value: none has ended, or all have.
  std::optional<Report> next(std::chrono::steady_clock::time_point deadline);
  bool done() const { return done_; }
  int descriptor() const { return reports_; }

 private:
  void start();
  void stop();
  [[noreturn]] void work(int reports);
  Report died(bool hung);

  Source source_;
  uint64_t next_, stride_, end_;
  std::chrono::seconds patience_;
  pid_t child_ = -1;
  int reports_ = -1, log_ = -1;
  std::string pending_;
  std::chrono::steady_clock::time_point started_{};
  bool done_ = false;
};

/// Runs one case in a child process.
std::optional<Finding> run_in_child(const Case& which, std::chrono::seconds patience);

/// A smaller case with a finding of the same kind; `trials` bounds the attempts.
Case shrink(Case which, const std::string& kind, std::chrono::seconds patience, int trials);

}  // namespace tessera::fuzz
