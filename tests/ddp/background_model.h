#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/optimizer.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_dict.h"

// What the tests of DistributedDataParallel in the background share.

namespace tessera::testing {

using Hosts = std::vector<int>;
using Model = DistributedDataParallel<Uneven>;
using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = Optimizer (*)(const std::vector<at::Tensor>& parameters);

inline const Hosts kPlacements[] = {{0}, {0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 0}};

inline DistributedDataParallelOptions small_buckets(bool background) {
  return {.first_bucket_mb = 20.0 / (1 << 20),
          .bucket_cap_mb = 60.0 / (1 << 20),
          .overlap = background ? Overlap::background : Overlap::backward};
}

inline bool has_memory(const torch::Tensor& tensor) {
  return compat::unchecked_data_ptr(tensor.storage().unsafeGetStorageImpl()).get() != nullptr;
}

inline Optimizer torch_adam(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.05));
}

inline void set_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) set_options(group.options(), {{"lr", lr}});
}

inline void expect_same_state(const OptimizerStateDict& a, const OptimizerStateDict& b) {
  ASSERT_EQ(a.state.size(), b.state.size());
  for (const auto& [name, state] : a.state) {
    EXPECT_EQ(state.scalars, b.state.at(name).scalars) << name;
    ASSERT_EQ(state.tensors.size(), b.state.at(name).tensors.size());
    for (const auto& [key, tensor] : state.tensors)
      EXPECT_TRUE(at::equal(tensor, b.state.at(name).tensors.at(key))) << name << " " << key;
  }
}

/// Eight steps with what programs do between them, in the background and not.
inline void expect_same_training(const Hosts& hosts, MakeOptimizer make,
                                 DistributedDataParallelOptions options = {},
                                 Overlap other = Overlap::backward) {
  const int world = static_cast<int>(hosts.size());
  run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
    const auto train = [&](bool background) {
      auto net = seeded<Uneven>(8);
      auto all = options;
      all.first_bucket_mb = small_buckets(background).first_bucket_mb;
      all.bucket_cap_mb = small_buckets(background).bucket_cap_mb;
      all.overlap = background ? Overlap::background : other;
      Model ddp(net, group, all);
      auto own = make(net->parameters());
      const auto backward = [&](int batch) { loss_of(ddp(rows(batch, rank, world))).backward(); };
      for (int i = 0; i < 8; ++i) {
        if (i % 3 == 1) {
          const auto scope = ddp.no_sync();
          backward(2 * i);
        }
        backward(2 * i + 1);
        if (i % 4 == 0) torch::nn::utils::clip_grad_norm_(net->parameters(), 0.1);
        own->step();
        set_lr(*own, 0.05 / (i + 1));  // of the next step
        if (i % 2 == 0) clear_gradients(net->parameters());
        else own->zero_grad();
      }
      return std::pair(net, state_dict(*own, named_parameters(*net)));
    };
    const auto [late, late_state] = train(true);
    const auto [plain, plain_state] = train(false);
    expect_same_weights(late, plain);
    expect_same_state(late_state, plain_state);
  });
}

/// A model that has made two steps, after which its buckets have their final places.
struct Warm {
  Warm(const ProcessGroup& group, bool background, MakeOptimizer make = adamw)
      : net(seeded<Uneven>(8)) {
    ddp.emplace(net, group, small_buckets(background));
    optimizer = make(net->parameters());
    for (int i = 0; i < 2; ++i) {
      backward(0);
      step();
    }
  }
  void backward(int batch) {
    const auto group = ddp->join_group();
    loss_of((*ddp)(rows(batch, group.rank(), group.size()))).backward();
  }
  void step() {
    optimizer->step();
    clear_gradients(net->parameters());
  }
  at::Tensor gradient() const { return net->last->weight.grad(); }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const auto& p : net->parameters()) all.push_back(p.grad());
    return all;
  }
  Uneven net;
  std::optional<Model> ddp;
  Optimizer optimizer;
};

}  // namespace tessera::testing
