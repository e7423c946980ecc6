#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adam.h>

#include "deferred/bits.h"
#include "harness/models.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

// A module and its training with each wrapper, which returns all bits of the trained module.

namespace tessera::testing {

/// Tied and frozen weights, a buffer, sizes that no world size divides, large and small tensors.
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(301, 77));
    hidden = register_module("hidden", torch::nn::Linear(77, 401));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({401})));
    back = register_module("back", torch::nn::Linear(401, 77));
    frozen = register_parameter("frozen", torch::randn({401, 77}), false);
    scale = register_buffer("scale", torch::rand({401, 77}));
    head = register_parameter("head", embedding->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    x = back(torch::tanh(norm(hidden(x)))) + at::linear(at::linear(x, frozen * scale), frozen.t());
    return at::linear(x, head);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear hidden{nullptr}, back{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  at::Tensor frozen, scale, head;
};
TORCH_MODULE(TiedNet);

inline TiedNet make_net(bool deferred, int rank) {
  const std::lock_guard lock(random_weights);
  torch::manual_seed(11 + rank);  // the values of rank 0 count
  return deferred ? deferred_init([] { return TiedNet(); }) : TiedNet();
}

inline at::Tensor tokens(int step, int rank) {
  return (torch::arange(24).reshape({2, 12}) * (7 + rank) + 13 * step) % 301;
}

using Bits = std::map<std::string, uint64_t>;
using Training = Bits (*)(TiedNet net, ProcessGroup group, int rank);

template <class Forward, class Step>
void train(Forward&& forward, Step&& step, int rank) {
  for (int i = 0; i < 3; ++i) {
    forward(tokens(i, rank)).square().mean().backward();
    step();
  }
}

inline Bits with_fsdp(TiedNet net, ProcessGroup group, int rank) {
  FullyShardedDataParallelOptions options;
  options.wrap_policy = wrap_leaves();
  FullyShardedDataParallel<TiedNet> fsdp(net, group, options);
  torch::optim::Adam optimizer(fsdp.parameters(), 1e-3);
  train(
      fsdp,
      [&] {
        optimizer.step();
        optimizer.zero_grad();
      },
      rank);
  Bits weights;
  for (const auto& [name, tensor] : fsdp.state_dict(-1)) weights[name] = bits(tensor);
  return weights;
}

inline Bits weights_of(TiedNet& net) {
  Bits weights;
  for (const auto& item : net->named_parameters()) weights[item.key()] = bits(item.value());
  for (const auto& item : net->named_buffers()) weights[item.key()] = bits(item.value());
  return weights;
}

inline Bits train_with_zero(TiedNet& net, const ProcessGroup& group, int rank,
                            ZeroRedundancyOptimizerOptions options) {
  ZeroRedundancyOptimizer zero(*net, group, default_optimizers().factory("AdamW", {{"lr", 1e-3}}),
                               options);
  train([&](const at::Tensor& x) { return net(x); },
        [&] {
          zero.step();
          zero.zero_grad();
        },
        rank);
  zero.wait();
  return weights_of(net);
}

inline Bits with_zero(TiedNet net, ProcessGroup group, int rank) {
  return train_with_zero(net, group, rank, {});
}

inline Bits with_shared_parameters(TiedNet net, ProcessGroup group, int rank) {
  return train_with_zero(net, group, rank, {.share_parameters = true});
}

inline Bits train_with_ddp(TiedNet& net, const ProcessGroup& group, int rank,
                           DistributedDataParallelOptions options) {
  DistributedDataParallel<TiedNet> ddp(net, group, options);
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  train(
      ddp,
      [&] {
        optimizer.step();
        optimizer.zero_grad();
      },
      rank);
  return weights_of(net);
}

inline Bits with_ddp(TiedNet net, ProcessGroup group, int rank) {
  return train_with_ddp(net, group, rank, {});
}

}  // namespace tessera::testing
