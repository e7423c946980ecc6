#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>

#include <c10/core/Stream.h>
#include <torch/types.h>

namespace tessera::sim {

/// A simulated accelerator, the devices PrivateUse1:0 to PrivateUse1:2. Its kernels are libtorch's
/// CPU kernels, which run later, on one thread for each stream, with random delays. The host cannot
/// read or write its memory: a program that does ends with the status kHostAccess and says so.
/// Memory that is freed is handed out again at once, as by a caching allocator, and new memory is
/// filled with NaN. So a missing stream wait, event or record_stream() gives a wrong result.
inline constexpr auto kType = c10::DeviceType::PrivateUse1;
inline constexpr int kDevices = 3;
inline constexpr int kHostAccess = 70;

/// Registers the device in this process, once. Delays are 0 to `max_delay_us` microseconds before
/// every second kernel, on average; they depend on the seed. The process must not fork afterwards.
void init(uint64_t seed, int max_delay_us);

at::Device device(int index = 0);
/// The calling thread's current stream on the device.
c10::Stream current_stream(int index = 0);
/// Runs `kernel` on the stream, after what was enqueued there before.
void enqueue(const c10::Stream& stream, std::function<void()> kernel);
/// The time of a stream if each kernel, copy and collective took one unit, and if streams waited
/// for events alone. It depends on the order of this process's calls, not on how long its kernels
/// take. Waits of the host are not part of it.
struct VirtualTime {
  uint64_t end = 0;   ///< Of all that was enqueued.
  uint64_t busy = 0;  ///< Units that the stream does not wait.
};
VirtualTime virtual_time(const c10::Stream& stream);
/// A CPU tensor over the memory of a device's tensor, for kernels alone. Does not own the memory.
at::Tensor kernel_view(const at::Tensor& tensor);
/// Waits for all streams. Throws the error of a kernel that failed.
void synchronize();

struct Stats {
  uint64_t kernels = 0;
  uint64_t host_waits = 0;  ///< The host waited for a stream or an event, for whatever reason.
  uint64_t allocations = 0;
  uint64_t reused = 0;     ///< Allocations that got freed memory.
  int64_t bytes = 0;       ///< Of tensors that exist; reset_stats() keeps it.
  int64_t peak_bytes = 0;  ///< The most of them since reset_stats().
  std::multiset<std::string> wait_reasons;
};
Stats stats();
void reset_stats();

/// CPU memory that copies without waiting read and write in place. libtorch 1.13 can make it for
/// CUDA alone.
at::Tensor pinned_empty(int64_t numel);

}  // namespace tessera::sim
