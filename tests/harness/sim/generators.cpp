#include "harness/sim/generators.h"

#include <array>

#include <ATen/CPUGeneratorImpl.h>

#include "harness/sim/sim.h"

namespace tessera::sim {

const at::Generator& generator(int device) {
  static const auto all = [] {
    std::array<at::Generator, kDevices> made;
    for (int i = 0; i < kDevices; ++i)
      made.at(i) = at::make_generator<at::CPUGeneratorImpl>(67 + i);
    return made;
  }();
  return all.at(device);
}

}  // namespace tessera::sim
