// examples/gpu_loop.cpp on the simulated device, whose name is sim.
#include <cstdlib>

#include "comm/device/backends.h"
#include "harness/device/device.h"
#include "tessera/tessera.h"
#include "tessera/train/devices.h"

#define main gpu_loop
#include "../../examples/gpu_loop.cpp"
#undef main

int main(int argc, char** argv) {
  const auto* const rank = std::getenv("RANK");
  tessera::on_device::start_rank(rank ? std::atoi(rank) : 0, 0, 1);
  tessera::comm::add_backend(tessera::on_device::backend(true));
  tessera::registry::add_device("sim", {tessera::on_device::type(), [](at::Device device) {
                                          return tessera::on_device::generator(device.index());
                                        }});
  const int status = gpu_loop(argc, argv);
  tessera::on_device::synchronize();
  return status;
}
