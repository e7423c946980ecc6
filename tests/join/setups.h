#pragma once

#include <algorithm>

#include <gtest/gtest.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/join.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::testing::joined {

/// The number of batches of each rank.
using Batches = std::vector<int>;

inline int longest(const Batches& batches) {
  return *std::max_element(batches.begin(), batches.end());
}

/// The parameters of one process that trains on all ranks' batches. Each step takes the sum of the
/// losses of the ranks that have a batch, over the divisor.
inline std::vector<at::Tensor> reference(const Batches& batches, bool divide_by_world) {
  auto net = seeded<Uneven>(1);
  auto optimizer = adamw(net->parameters());
  for (int step = 0; step < longest(batches); ++step) {
    std::vector<at::Tensor> losses;
    for (size_t rank = 0; rank < batches.size(); ++rank)
      if (step < batches[rank])
        losses.push_back(loss_of(net(own_rows(step, static_cast<int>(rank)))));
    const auto divisor = static_cast<double>(divide_by_world ? batches.size() : losses.size());
    optimizer->zero_grad();
    (at::stack(losses).sum() / divisor).backward();
    optimizer->step();
  }
  return copies(net->parameters());
}

/// A model with its wrappers and optimizer. Subclasses run the same iteration with other wrappers.
struct Setup {
  virtual ~Setup() = default;
  virtual std::vector<std::reference_wrapper<Joinable>> joinables() = 0;
  virtual void iteration(const at::Tensor& x) = 0;
  virtual std::vector<at::Tensor> parameters() { return copies(net->parameters()); }
  Uneven net{nullptr};
};

struct DdpSetup : Setup {
  DdpSetup(ProcessGroup group, DistributedDataParallelOptions options) {
    net = seeded<Uneven>(1);
    ddp = std::make_unique<DistributedDataParallel<Uneven>>(net, group, options);
    optimizer = adamw(net->parameters());
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {*ddp}; }
  void iteration(const at::Tensor& x) override {
    optimizer->zero_grad();
    loss_of((*ddp)(x)).backward();
    optimizer->step();
  }
  std::unique_ptr<DistributedDataParallel<Uneven>> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

struct ZeroSetup : Setup {
  ZeroSetup(ProcessGroup group, ZeroRedundancyOptimizerOptions options) {
    net = seeded<Uneven>(1);
    zero = std::make_unique<ZeroRedundancyOptimizer>(*net, group, adamw_factory(), options);
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {*zero}; }
  void iteration(const at::Tensor& x) override {
    zero->zero_grad();
    loss_of(net(x)).backward();
    zero->step();
  }
  std::unique_ptr<ZeroRedundancyOptimizer> zero;
};

struct DdpWithZeroSetup : Setup {
  DdpWithZeroSetup(ProcessGroup group, ZeroRedundancyOptimizerOptions options) {
    net = seeded<Uneven>(1);
    options.reduce_gradients = false;
    zero = std::make_unique<ZeroRedundancyOptimizer>(*net, group, adamw_factory(), options);
    ddp = std::make_unique<DistributedDataParallel<Uneven>>(net, group);
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {*ddp, *zero}; }
  void iteration(const at::Tensor& x) override {
    zero->zero_grad();
    loss_of((*ddp)(x)).backward();
    zero->step();
  }
  std::unique_ptr<DistributedDataParallel<Uneven>> ddp;
  std::unique_ptr<ZeroRedundancyOptimizer> zero;
};

struct DistributedOptimizerSetup : Setup {
  DistributedOptimizerSetup(ProcessGroup group, DistributedOptimizerOptions options) {
    net = seeded<Uneven>(1);
    optimizer = std::make_unique<DistributedOptimizer>(*net, group, adamw_factory(), options);
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {*optimizer}; }
  void iteration(const at::Tensor& x) override {
    optimizer->zero_grad();
    optimizer->backward(loss_of(net(x)));
    optimizer->step();
  }
  std::unique_ptr<DistributedOptimizer> optimizer;
};

struct FsdpSetup : Setup {
  FsdpSetup(ProcessGroup group, FullyShardedDataParallelOptions options) {
    net = seeded<Uneven>(1);
    fsdp = std::make_unique<FullyShardedDataParallel<Uneven>>(net, group, options);
    optimizer = adamw(fsdp->parameters());
    fsdp->set_shadow_step([this] {
      optimizer->zero_grad();
      fsdp->shadow_backward();
      optimizer->step();
    });
  }
  std::vector<std::reference_wrapper<Joinable>> joinables() override { return {*fsdp}; }
  void iteration(const at::Tensor& x) override {
    optimizer->zero_grad();
    loss_of((*fsdp)(x)).backward();
    optimizer->step();
  }
  std::vector<at::Tensor> parameters() override {
    const auto whole = fsdp->summon_full_params("", false);
    return copies(net->parameters());
  }
  std::unique_ptr<FullyShardedDataParallel<Uneven>> fsdp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

struct Case {
  std::string name;
  std::function<std::unique_ptr<Setup>(ProcessGroup)> make;
};

inline constexpr double kTiny = 60.0 / (1 << 20);

inline std::vector<Case> cases() {
  std::vector<Case> all;
  const auto ddp = [&](const std::string& name, DistributedDataParallelOptions options) {
    all.push_back({name, [options](ProcessGroup group) {
                     return std::make_unique<DdpSetup>(group, options);
                   }});
  };
  ddp("ddp", {});
  ddp("ddp_buckets", {.first_bucket_mb = kTiny / 3, .bucket_cap_mb = kTiny});
  ddp("ddp_unused", {.bucket_cap_mb = kTiny, .find_unused_parameters = true});
  ddp("ddp_background", {.bucket_cap_mb = kTiny, .overlap = Overlap::background});
  ddp("ddp_static_graph", {.bucket_cap_mb = kTiny, .static_graph = true});
  for (const auto partition : {Partition::flat, Partition::whole, Partition::first_fit}) {
    const std::string name = partition_name(partition);
    ZeroRedundancyOptimizerOptions options{.partition = partition},
        sharded{.partition = partition, .bucket_cap_mb = kTiny, .shard_gradients = true};
    all.push_back({"zero_" + name, [options](ProcessGroup group) {
                     return std::make_unique<ZeroSetup>(group, options);
                   }});
    auto background = options;
    background.overlap = Overlap::background;
    all.push_back({"zero_background_" + name, [background](ProcessGroup group) {
                     return std::make_unique<ZeroSetup>(group, background);
                   }});
    all.push_back({"zero_sharded_" + name, [sharded](ProcessGroup group) {
                     return std::make_unique<ZeroSetup>(group, sharded);
                   }});
    all.push_back({"ddp_zero_" + name, [options](ProcessGroup group) {
                     return std::make_unique<DdpWithZeroSetup>(group, options);
                   }});
  }
  for (const bool pack : {false, true}) {
    DistributedOptimizerOptions options{
        .reduce_method = "mean", .param_pack = pack, .param_pack_thd = 20};
    all.push_back({pack ? "distributed_packed" : "distributed", [options](ProcessGroup group) {
                     return std::make_unique<DistributedOptimizerSetup>(group, options);
                   }});
  }
  const auto fsdp = [&](const std::string& name, FullyShardedDataParallelOptions options) {
    all.push_back({name, [options](ProcessGroup group) {
                     return std::make_unique<FsdpSetup>(group, options);
                   }});
  };
  const auto leaves = wrap_leaves();
  fsdp("fsdp_root", {});
  fsdp("fsdp_leaves", {.wrap_policy = leaves});
  fsdp("fsdp_no_overlap", {.wrap_policy = leaves, .overlap = Overlap::none});
  fsdp("fsdp_background", {.wrap_policy = leaves, .overlap = Overlap::background});
  fsdp("fsdp_post", {.wrap_policy = leaves, .backward_prefetch = BackwardPrefetch::post});
  fsdp("fsdp_tiny_budget", {.wrap_policy = leaves, .resident_bytes = 1});
  fsdp("fsdp_all_stays", {.wrap_policy = leaves, .resident_bytes = 1 << 20});
  fsdp("fsdp_grad_op",
       {.wrap_policy = leaves, .sharding_strategy = ShardingStrategy::shard_grad_op});
  fsdp("fsdp_no_shard", {.wrap_policy = leaves, .sharding_strategy = ShardingStrategy::no_shard});
  return all;
}

}  // namespace tessera::testing::joined
