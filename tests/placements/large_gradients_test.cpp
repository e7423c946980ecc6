// Gradients in float16 whose sum over the ranks is out of range, and whose mean is not. The ranks
// are threads of one process, so their hosts are numbers.
#include <cmath>

#include <gtest/gtest.h>

#include "placements/wrappers.h"
#include "tessera/detail/trainer_access.h"

namespace tessera::testing {
namespace {

constexpr double kGradient = 40000;  // 2 * 40000 is more than float16 has

struct Scaled : torch::nn::Module {
  explicit Scaled(int64_t n) { weight = register_parameter("weight", torch::ones({n})); }
  at::Tensor forward() { return weight * 1; }
  at::Tensor weight;
};

struct ManyWeights : torch::nn::Module {
  ManyWeights() {
    first = register_module("first", std::make_shared<Scaled>(7));
    second = register_module("second", std::make_shared<Scaled>(3001));
  }
  at::Tensor forward() { return torch::cat({first->forward(), second->forward()}); }
  std::shared_ptr<Scaled> first, second;
};
using LargeNet = std::shared_ptr<ManyWeights>;

OptimizerFactory small_steps() { return default_optimizers().factory("SGD", {{"lr", 1.0 / 1024}}); }

void backward_of(const at::Tensor& output, double gradient = kGradient) {
  output.backward(at::full_like(output, gradient));
}

/// One step of `net`, whose gradients are kGradient on every rank.
using LargeStep = std::function<void(ProcessGroup group, LargeNet net)>;

LargeStep ddp_step(const DistributedDataParallelOptions& options) {
  return [options](ProcessGroup group, LargeNet net) {
    DistributedDataParallel<LargeNet> ddp(net, group, options);
    auto optimizer = small_steps()({torch::optim::OptimizerParamGroup(net->parameters())});
    backward_of(ddp());
    optimizer->step();
  };
}

LargeStep zero_step(const ZeroRedundancyOptimizerOptions& options, int backwards = 1,
                    bool clips = false, bool in_place = false) {
  return [=](ProcessGroup group, LargeNet net) {
    ZeroRedundancyOptimizer zero(*net, group, small_steps(), options);
    if (in_place) tessera::zero::TrainerAccess::use_up_gradients(zero);
    for (int i = 0; i < backwards; ++i) backward_of(net->forward(), kGradient / backwards);
    if (clips) EXPECT_EQ(zero.clip_grad_norm_(INFINITY, INFINITY), kGradient);
    zero.step();
  };
}

LargeStep distributed_step(bool packs) {
  return [packs](ProcessGroup group, LargeNet net) {
    DistributedOptimizer optimizer(*net, group, small_steps(),
                                   {.reduce_method = "mean", .param_pack = packs});
    optimizer.backward(net->forward().mul(kGradient).sum());
    optimizer.step();
  };
}

LargeStep fsdp_step(ShardingStrategy strategy, int shard_group_size = 0,
                    MixedPrecision mixed_precision = {}) {
  return [=](ProcessGroup group, LargeNet net) {
    FullyShardedDataParallelOptions options;
    options.wrap_policy = wrap_by_type<Scaled>();
    options.sharding_strategy = strategy;
    options.shard_group_size = shard_group_size;
    options.mixed_precision = mixed_precision;
    if (mixed_precision.param_dtype) net->to(at::kFloat);
    FullyShardedDataParallel<LargeNet> fsdp(net, group, options);
    auto optimizer = small_steps()({torch::optim::OptimizerParamGroup(fsdp.parameters())});
    for (int i = 0; i < 2; ++i) backward_of(fsdp(), kGradient / 2);
    optimizer->step();
    const auto scope = fsdp.summon_full_params();
    for (auto& parameter : net->parameters())
      EXPECT_EQ((parameter - (1 - kGradient / 1024)).abs().max().item<double>(), 0);
  };
}

LargeNet fresh_weights() {
  auto net = std::make_shared<ManyWeights>();
  net->to(at::kHalf);
  return net;
}

void expect_means(const std::string& name, const LargeStep& step) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{0, 0}, {0, 0, 0, 0}, {0, 1}, {0, 0, 1, 1}}) {
    SCOPED_TRACE(name + " on " + ::testing::PrintToString(hosts));
    run_ranks_on(hosts, [&](ProcessGroup group, int) {
      auto net = fresh_weights();
      step(group, net);
      if (name.rfind("fsdp", 0) == 0) return;  // compares the whole parameters itself
      for (const auto& parameter : net->parameters())
        EXPECT_EQ((parameter.to(at::kFloat) - (1 - kGradient / 1024)).abs().max().item<double>(),
                  0);
    });
  }
}

TEST(LargeGradients, TheMeanOfDataParallelIsInRange) {
  expect_means("ddp", ddp_step({}));
  expect_means("ddp, in background", ddp_step({.overlap = Overlap::background}));
  expect_means("ddp, compressed", ddp_step({.comm_hook = fp16_compress_hook()}));
  expect_means("distributed optimizer", distributed_step(false));
  expect_means("distributed optimizer, packed", distributed_step(true));
}

TEST(LargeGradients, TheMeanOfZeroIsInRange) {
  expect_means("zero", zero_step({.overlap = Overlap::none}));
  expect_means("zero, in backward", zero_step({.overlap = Overlap::background}));
  expect_means("zero, two backwards", zero_step({.overlap = Overlap::background}, 2));
  expect_means("zero, clipped", zero_step({}, 1, true));
  expect_means("zero, clipped in place", zero_step({}, 1, true, true));
  expect_means("zero, sharded gradients", zero_step({.shard_gradients = true}, 2));
}

TEST(LargeGradients, TheMeanOfFullyShardedIsInRange) {
  const MixedPrecision half{.param_dtype = at::kHalf};
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
    expect_means("fsdp", fsdp_step(strategy));
    expect_means("fsdp, mixed precision", fsdp_step(strategy, 0, half));
  }
  expect_means("fsdp, hybrid", fsdp_step(ShardingStrategy::hybrid_shard, 2));
  expect_means("fsdp, hybrid, mixed precision", fsdp_step(ShardingStrategy::hybrid_shard, 2, half));
}

}  // namespace
}  // namespace tessera::testing
