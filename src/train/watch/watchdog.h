#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "tessera/process_group.h"
#include "tessera/train/config.h"
#include "train/watch/heartbeat.h"

namespace tessera::train {

/// The exit code of a rank that its watchdog ends.
constexpr int kNoProgress = 3;

/// A thread that ends this rank when it makes no progress. It writes a report to standard error:
/// the rank's present work, its collectives and the stacks of its threads. Then it waits some
/// seconds for the reports of the other ranks, and ends the process with exit code kNoProgress.
///
/// Its clock counts its own turns. While the process is stopped, or the machine sleeps, no time
/// passes. Nothing allocates memory after construction.
class Watchdog {
 public:
  /// `heartbeat` must live longer. `asked_to_stop`: whether a signal has asked this rank to stop.
  /// If it has, and the rank has made no progress for as long as its peers wait (the group's
  /// time-out), the report is written, too, because the launcher is about to kill the rank. Without
  /// `config.factor` there is no thread. Throws Error if the thread cannot be started.
  Watchdog(const WatchdogConfig& config, const Heartbeat& heartbeat, const ProcessGroup& group,
           std::function<bool()> asked_to_stop);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch() noexcept;
  bool wait_a_turn() noexcept;
  double limit() const noexcept;
  void report(double quiet, double limit) const noexcept;
  void report_collectives() const noexcept;

  const WatchdogConfig config_;
  const Heartbeat& heartbeat_;
  const int rank_;
  const double peers_wait_;  // seconds
  const std::function<bool()> asked_to_stop_;
  std::chrono::duration<double> turn_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace tessera::train
