#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>

#include "comm/base/device_backend.h"

/// The accelerator of a test program: the simulated device in test_device, CUDA in test_cuda. The
/// functions are for processes of run_processes().
namespace tessera::on_device {

c10::DeviceType type();
/// In model.device, and of the group's backend.
std::string name();
std::string backend_name();
int devices();
/// Whether its kernels are those of the CPU, so that a training has the same bits.
bool has_kernels_of_cpu();
/// The largest world that parity tests start, and how long a rank may run. Ranks that share one
/// CUDA device take turns on it.
int most_ranks();
unsigned seconds_of_a_rank();

/// The device `index` modulo devices().
at::Device device(int index = 0);
/// The calling thread's current stream on the device.
c10::Stream current_stream(int index = 0);
/// Waits for all streams. Throws the error of a kernel that failed.
void synchronize();
/// The device's default generator.
at::Generator generator(int index);

struct Stats {
  uint64_t kernels = 0;
  uint64_t host_waits = 0;  ///< The host waited for a stream or an event, for whatever reason.
  std::multiset<std::string> wait_reasons;
};
Stats stats();
void reset_stats();

/// Prepares a process for rank `rank` of `world`. The process must not fork afterwards.
void start_rank(int rank, int world, uint64_t seed);
/// `exclusive`: it refuses two ranks on one device.
std::shared_ptr<const comm::DeviceBackend> backend(bool exclusive);

}  // namespace tessera::on_device
