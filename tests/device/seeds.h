#pragma once

#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "harness/device/device.h"

namespace tessera::on_device {

/// Seeds of the delays: from 1 on, `usual` of them. TESSERA_TEST_SEEDS=first:count asks for others.
/// One alone where no delays are simulated, or where a test needs one alone.
inline std::vector<int> seeds(int usual) {
  int first = 1, count = usual;
  if (const char* const wanted = std::getenv("TESSERA_TEST_SEEDS")) {
    const std::string text = wanted;
    first = std::stoi(text);
    if (usual > 1) count = std::stoi(text.substr(text.find(':') + 1));
  }
  std::vector<int> result(has_kernels_of_cpu() ? count : 1);
  std::iota(result.begin(), result.end(), first);
  return result;
}

}  // namespace tessera::on_device
