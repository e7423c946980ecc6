#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include <c10/core/Stream.h>

#include "harness/sim/sim.h"

namespace tessera::sim {

inline constexpr int kStreams = 33;  // of each device; 0 is the default stream

/// One stream: runs kernels in order on a thread of its own. It is never destroyed.
class StreamQueue {
 public:
  StreamQueue(uint64_t seed, int max_delay_us);
  /// `time`: what the kernel takes of the stream's virtual time.
  void enqueue(std::function<void()> kernel, uint64_t time = 0);
  VirtualTime time();
  /// What is enqueued from now on begins at this virtual time at the earliest.
  void not_before(uint64_t time);
  /// The host waits until all that was enqueued has run. `reason` is counted.
  void wait(const std::string& reason);
  bool idle();

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> kernels_;
  uint64_t enqueued_ = 0, finished_ = 0;
  VirtualTime time_;
  std::exception_ptr error_;
  std::mt19937_64 random_;
  int max_delay_us_;
};

StreamQueue& queue_of(const c10::Stream& stream);
c10::Stream stream_of(int device, c10::StreamId id);
/// A stream other than the default one, another on each call.
c10::Stream next_stream(int device);
/// Returns the stream that was current.
c10::Stream exchange_stream(const c10::Stream& stream);
int current_device();
int exchange_device(int device);
void start_streams(uint64_t seed, int max_delay_us);
void count_host_wait(const std::string& reason);
void count_kernel();
void count_allocation(int64_t bytes, bool reused);
void count_release(int64_t bytes);

/// A point of a stream, which other streams wait for.
class EventState {
 public:
  static void record(const std::shared_ptr<EventState>& event, const c10::Stream& stream);
  static void block(const std::shared_ptr<EventState>& event, const c10::Stream& stream);
  bool done();
  void synchronize();

 private:
  void await(uint64_t version);

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t recorded_ = 0, reached_ = 0;
  uint64_t time_ = 0;  // of the last record
};

}  // namespace tessera::sim
