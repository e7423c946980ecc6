// The simulated device as the accelerator of a test program.
#include "harness/device/device.h"
#include "harness/sim/device_backend.h"
#include "harness/sim/generators.h"
#include "harness/sim/sim.h"

namespace tessera::on_device {

namespace {
constexpr int kMaxDelayUs = 150;
}  // namespace

c10::DeviceType type() { return sim::kType; }
std::string name() { return "sim"; }
std::string backend_name() { return "sim"; }
int devices() { return sim::kDevices; }
bool has_kernels_of_cpu() { return true; }
int most_ranks() { return 4; }
unsigned seconds_of_a_rank() { return 60; }
at::Device device(int index) { return sim::device(index % sim::kDevices); }
c10::Stream current_stream(int index) { return sim::current_stream(device(index).index()); }
void synchronize() { sim::synchronize(); }
at::Generator generator(int index) { return sim::generator(device(index).index()); }

Stats stats() {
  const auto all = sim::stats();
  return {all.kernels, all.host_waits, all.wait_reasons};
}
void reset_stats() { sim::reset_stats(); }

void start_rank(int rank, int /*world*/, uint64_t seed) { sim::init(seed * 8 + rank, kMaxDelayUs); }
std::shared_ptr<const comm::DeviceBackend> backend(bool exclusive) {
  return sim::device_backend(exclusive);
}

}  // namespace tessera::on_device
