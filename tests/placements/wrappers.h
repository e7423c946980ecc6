#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/join.h"
#include "tessera/optim/master_weights.h"
#include "tessera/zero_redundancy_optimizer.h"

// The same training with each wrapper, so that placements of ranks on hosts can be compared.

namespace tessera::testing {

struct Training {
  WireOptions wire = {};
  at::ScalarType dtype = at::kFloat;
  int steps = 4;
  bool joins = false;  ///< Rank r makes r steps less than `steps` + the last rank.
  bool master_weights = false;

  OptimizerFactory factory() const {
    return master_weights ? with_master_weights(adamw_factory()) : adamw_factory();
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer(std::vector<at::Tensor> parameters) const {
    return factory()({torch::optim::OptimizerParamGroup(std::move(parameters))});
  }
};

using Tensors = std::vector<at::Tensor>;
/// Trains Uneven from the same weights and returns its parameters, whole, on every rank.
using Train = std::function<Tensors(ProcessGroup group, int rank, const Training& training)>;

struct NamedTrain {
  std::string name;
  Train train;
  bool gathers = false;  ///< wire.parameters applies.
  bool shares = false;   ///< The ranks of a host must have shared memory.
};

inline Uneven fresh(const Training& training) {
  auto net = seeded<Uneven>(8);
  net->to(training.dtype);
  return net;
}

/// `step`(batch) for each of this rank's batches.
template <class Step>
void for_each_batch(const ProcessGroup& group, int rank, const Training& training,
                    const std::vector<std::reference_wrapper<Joinable>>& joinables,
                    const Step& step) {
  const int end = training.joins ? training.steps + group.size() - 1 - rank : training.steps;
  const auto loop = [&](const std::function<void()>& next) {
    for (int i = 0; i < end; ++i) {
      next();
      step(own_rows(i, rank).to(training.dtype));
    }
  };
  if (!training.joins) return loop([] {});
  join(joinables, {}, [&](JoinLoop& iteration) { loop([&] { iteration.next(); }); });
}

inline Tensors train_ddp(ProcessGroup group, int rank, const Training& training, Overlap overlap) {
  auto net = fresh(training);
  DistributedDataParallel ddp(
      net, group,
      {.first_bucket_mb = 1e-5, .bucket_cap_mb = 2e-4, .overlap = overlap, .wire = training.wire});
  auto optimizer = training.optimizer(net->parameters());
  for_each_batch(group, rank, training, {ddp}, [&](const at::Tensor& x) {
    optimizer->zero_grad();
    loss_of(ddp(x)).backward();
    optimizer->step();
  });
  return copies(net->parameters());
}

inline Tensors train_zero(ProcessGroup group, int rank, const Training& training,
                          ZeroRedundancyOptimizerOptions options) {
  auto net = fresh(training);
  options.bucket_cap_mb = 2e-4;
  options.wire = training.wire;
  ZeroRedundancyOptimizer zero(*net, group, training.factory(), options);
  for_each_batch(group, rank, training, {zero}, [&](const at::Tensor& x) {
    zero.zero_grad();
    loss_of(net(x)).backward();
    zero.step();
  });
  return copies(net->parameters());
}

inline Tensors train_distributed(ProcessGroup group, int rank, const Training& training) {
  auto net = fresh(training);
  DistributedOptimizer optimizer(
      *net, group, training.factory(),
      {.reduce_method = "mean", .param_pack = true, .param_pack_thd = 100, .wire = training.wire});
  for_each_batch(group, rank, training, {optimizer}, [&](const at::Tensor& x) {
    optimizer.zero_grad();
    optimizer.backward(loss_of(net(x)));
    optimizer.step();
  });
  return copies(net->parameters());
}

inline Tensors train_fsdp(ProcessGroup group, int rank, const Training& training,
                          ShardingStrategy strategy, int shard_group_size) {
  auto net = fresh(training);
  FullyShardedDataParallelOptions options;
  options.wrap_policy = wrap_by_type<torch::nn::LinearImpl>();
  options.sharding_strategy = strategy;
  options.shard_group_size = shard_group_size;
  options.wire = training.wire;
  FullyShardedDataParallel fsdp(net, group, options);
  auto optimizer = training.optimizer(fsdp.parameters());
  fsdp.set_shadow_step([&] {
    optimizer->zero_grad();
    fsdp.shadow_backward();
    optimizer->step();
  });
  for_each_batch(group, rank, training, {fsdp}, [&](const at::Tensor& x) {
    optimizer->zero_grad();
    loss_of(fsdp(x)).backward();
    optimizer->step();
  });
  Tensors whole;
  const auto scope = fsdp.summon_full_params();
  for (const auto& parameter : net->parameters()) whole.push_back(parameter.detach().clone());
  return whole;
}

/// `world`: the number of ranks; hybrid sharding is left out where two does not divide it.
inline std::vector<NamedTrain> all_trainings(int world) {
  const auto fsdp = [](ShardingStrategy strategy, int size) {
    return [=](ProcessGroup group, int rank, const Training& training) {
      return train_fsdp(group, rank, training, strategy, size);
    };
  };
  const auto zero = [](const ZeroRedundancyOptimizerOptions& options) {
    return [=](ProcessGroup group, int rank, const Training& training) {
      return train_zero(group, rank, training, options);
    };
  };
  const auto ddp = [](Overlap overlap) {
    return [overlap](ProcessGroup group, int rank, const Training& training) {
      return train_ddp(group, rank, training, overlap);
    };
  };
  std::vector<NamedTrain> all{
      {"ddp", ddp(Overlap::backward)},
      {"ddp, no overlap", ddp(Overlap::none)},
      {"ddp, in background", ddp(Overlap::background)},
      {"zero, no overlap", zero({.overlap = Overlap::none}), true},
      {"zero", zero({}), true},
      {"zero, in background", zero({.overlap = Overlap::background}), true},
      {"zero, sharded gradients", zero({.shard_gradients = true}), true},
      {"zero, shared parameters", zero({.share_parameters = true}), true, true},
      {"distributed optimizer", train_distributed},
      {"fsdp", fsdp(ShardingStrategy::full_shard, 0), true},
      {"fsdp, shard_grad_op", fsdp(ShardingStrategy::shard_grad_op, 0), true}};
  if (world % 2 == 0)
    all.push_back({"fsdp, hybrid", fsdp(ShardingStrategy::hybrid_shard, 2), true});
  return all;
}

}  // namespace tessera::testing
