#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "harness/device/device.h"
#include "harness/sim/sim.h"

// What runs beside computation, in the virtual time of the simulated device.

namespace tessera::on_device {

/// One unit, or one bucket. It computes for longer than its gather or reduction takes.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int width)
      : linear(register_module("linear", torch::nn::Linear(width, width))) {}
  at::Tensor forward(at::Tensor x) {
    constexpr int kOperators = 12;
    x = linear(x);
    for (int i = 0; i < kOperators; ++i) x = x.tanh();
    return x;
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

struct TowerImpl : torch::nn::Module {
  TowerImpl(int blocks, int width) {
    for (int i = 0; i < blocks; ++i)
      all.push_back(register_module("block" + std::to_string(i), Block(width)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : all) x = block(x);
    return x;
  }
  std::vector<Block> all;
};
TORCH_MODULE(Tower);

struct Spent {
  uint64_t busy = 0, waiting = 0;  // of the compute stream
};

inline Spent spent_in(const std::function<void()>& part) {
  const auto before = sim::virtual_time(current_stream());
  part();
  const auto after = sim::virtual_time(current_stream());
  const auto busy = after.busy - before.busy;
  return {busy, after.end - before.end - busy};
}

}  // namespace tessera::on_device
