#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "fuzz/training/model/blocks.h"

namespace tessera::fuzz {

/// The data of one rank for one forward.
struct Batch {
  at::Tensor x, tokens, y;
  bool branch = true;
  int expert = 0;
};

/// The same for the same arguments, on every thread. `dtype` of x and y.
Batch make_batch(uint64_t seed, int step, int micro, int rank, at::ScalarType dtype);

at::ScalarType dtype_of(const Case& which);

/// Where an event makes the user's code throw.
enum class Trap { nowhere, forward, backward, hook };

/// Thrown by a trap: a user's exception, none of the library's.
struct Sprung : std::runtime_error {
  Sprung() : std::runtime_error("the user's code has thrown") {}
};

/// The model of a case: its blocks one after the other, then a linear layer.
class Net : public torch::nn::Module {
 public:
  /// Weights follow from `seed`. Thread-safe.
  static std::shared_ptr<Net> make(const Case& which, uint64_t seed);

  at::Tensor forward(const Batch& batch);
  at::Tensor loss(const at::Tensor& output, const Batch& batch) const;

  /// Block number `i` modulo the number of blocks and of the last layer.
  torch::nn::Module& part(int i);
  const std::string& part_name(int i) const;

  Trap trap = Trap::nowhere;  ///< Of the next forward.
  bool slow = false;          ///< Waits within the next forward, and within its backward.

 private:
  explicit Net(const Case& which);

  std::vector<std::shared_ptr<Block>> blocks_;
  std::vector<std::string> names_;
  torch::nn::Linear last_{nullptr};
};

}  // namespace tessera::fuzz
