#include "harness/sim/streams.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <utility>

namespace tessera::sim {
namespace {

uint64_t seed_of_all = 1;
int delay_of_all = 0;
std::mutex queues_mutex;
std::array<std::array<StreamQueue*, kStreams>, kDevices> queues{};
std::mutex stats_mutex;
Stats counted;
std::atomic<int> handed_out{0};
thread_local int this_device = 0;
thread_local std::array<c10::StreamId, kDevices> this_stream{};

}  // namespace

StreamQueue::StreamQueue(uint64_t seed, int max_delay_us)
    : random_(seed), max_delay_us_(max_delay_us) {
  std::thread([this] { loop(); }).detach();
}

void StreamQueue::loop() {
  at::set_num_threads(1);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !kernels_.empty(); });
    auto kernel = std::move(kernels_.front());
    kernels_.pop_front();
    lock.unlock();
    if (max_delay_us_ > 0 && random_() % 2)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % max_delay_us_));
    std::exception_ptr error;
    try {
      kernel();
    } catch (...) {
      error = std::current_exception();
    }
    kernel = nullptr;
    lock.lock();
    if (!error_) error_ = error;
    ++finished_;
    changed_.notify_all();
  }
}

void StreamQueue::enqueue(std::function<void()> kernel, uint64_t time) {
  std::lock_guard lock(mutex_);
  kernels_.push_back(std::move(kernel));
  ++enqueued_;
  time_.end += time;
  time_.busy += time;
  changed_.notify_all();
}

VirtualTime StreamQueue::time() {
  std::lock_guard lock(mutex_);
  return time_;
}

void StreamQueue::not_before(uint64_t time) {
  std::lock_guard lock(mutex_);
  time_.end = std::max(time_.end, time);
}

void StreamQueue::wait(const std::string& reason) {
  count_host_wait(reason);
  std::unique_lock lock(mutex_);
  const auto until = enqueued_;
  changed_.wait(lock, [&] { return finished_ >= until; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

bool StreamQueue::idle() {
  std::lock_guard lock(mutex_);
  return finished_ == enqueued_;
}

StreamQueue& queue_of(const c10::Stream& stream) {
  std::lock_guard lock(queues_mutex);
  auto& queue = queues.at(stream.device_index()).at(stream.id());
  if (!queue)
    queue = new StreamQueue(seed_of_all * 1000 + stream.device_index() * kStreams + stream.id(),
                            delay_of_all);
  return *queue;
}

c10::Stream stream_of(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, sim::device(device), id);
}
c10::Stream next_stream(int device) { return stream_of(device, 1 + handed_out++ % (kStreams - 1)); }
c10::Stream current_stream(int index) { return stream_of(index, this_stream.at(index)); }
c10::Stream exchange_stream(const c10::Stream& stream) {
  return stream_of(stream.device_index(),
                   std::exchange(this_stream.at(stream.device_index()), stream.id()));
}
int current_device() { return this_device; }
int exchange_device(int device) { return std::exchange(this_device, device); }

void start_streams(uint64_t seed, int max_delay_us) {
  seed_of_all = seed;
  delay_of_all = max_delay_us;
}

at::Device device(int index) { return at::Device(kType, static_cast<c10::DeviceIndex>(index)); }
void enqueue(const c10::Stream& stream, std::function<void()> kernel) {
  queue_of(stream).enqueue(std::move(kernel), 1);
}
VirtualTime virtual_time(const c10::Stream& stream) { return queue_of(stream).time(); }

void synchronize() {
  for (int device = 0; device < kDevices; ++device) {
    for (int id = 0; id < kStreams; ++id)
      if (queues[device][id]) queues[device][id]->wait("synchronize");
  }
}

void count_host_wait(const std::string& reason) {
  std::lock_guard lock(stats_mutex);
  ++counted.host_waits;
  counted.wait_reasons.insert(reason);
}
void count_kernel() {
  std::lock_guard lock(stats_mutex);
  ++counted.kernels;
}
void count_allocation(int64_t bytes, bool reused) {
  std::lock_guard lock(stats_mutex);
  ++counted.allocations;
  counted.reused += reused;
  counted.bytes += bytes;
  counted.peak_bytes = std::max(counted.peak_bytes, counted.bytes);
}
void count_release(int64_t bytes) {
  std::lock_guard lock(stats_mutex);
  counted.bytes -= bytes;
}
Stats stats() {
  std::lock_guard lock(stats_mutex);
  return counted;
}
void reset_stats() {
  std::lock_guard lock(stats_mutex);
  Stats none;
  none.bytes = none.peak_bytes = counted.bytes;
  counted = none;
}

void EventState::record(const std::shared_ptr<EventState>& event, const c10::Stream& stream) {
  uint64_t version = 0;
  {
    std::lock_guard lock(event->mutex_);
    version = ++event->recorded_;
    event->time_ = queue_of(stream).time().end;
  }
  queue_of(stream).enqueue([event, version] {
    std::lock_guard lock(event->mutex_);
    event->reached_ = std::max(event->reached_, version);
    event->changed_.notify_all();
  });
}

void EventState::await(uint64_t version) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_ >= version; });
}

void EventState::block(const std::shared_ptr<EventState>& event, const c10::Stream& stream) {
  uint64_t version = 0, time = 0;
  {
    std::lock_guard lock(event->mutex_);
    version = event->recorded_;
    time = event->time_;
  }
  queue_of(stream).not_before(time);
  queue_of(stream).enqueue([event, version] { event->await(version); });
}

bool EventState::done() {
  std::lock_guard lock(mutex_);
  return reached_ >= recorded_;
}

void EventState::synchronize() {
  count_host_wait("event");
  uint64_t version = 0;
  {
    std::lock_guard lock(mutex_);
    version = recorded_;
  }
  await(version);
}

}  // namespace tessera::sim
