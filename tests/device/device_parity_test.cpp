// The wrappers on a device: on the simulated one the bits of the CPU, and few waits of the host.
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include "device/expect_success.h"
#include "device/parity.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/optim/master_weights.h"
#include "tessera/step/clip_grad.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::on_device {
namespace {

std::vector<at::Tensor> gradients(const torch::nn::Module& net) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : net.parameters()) result.push_back(parameter.grad());
  return result;
}

void read(double /*norm*/) {}

Training ddp(Variant variant = {}) {
  return [variant](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    DistributedDataParallel ddp(net, group);
    torch::optim::SGD optimizer(net->parameters(), momentum());
    const auto clip = [&] {
      const auto norm = clip_gradient_norm_(gradients(*net), 0.1);
      if (variant.reads_norm) read(norm);
    };
    const double waits = train(ddp, optimizer, ddp, group, where, variant, clip);
    return {on_cpu(net->parameters()), waits};
  };
}

Training zero(const std::function<void(ZeroRedundancyOptimizerOptions&)>& change,
              Variant variant = {}) {
  return [change, variant](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    ZeroRedundancyOptimizerOptions options;
    change(options);
    // A fused optimizer would have kernels of its own on the CPU.
    ZeroRedundancyOptimizer optimizer(*net, group, optimizer_factory<torch::optim::SGD>(momentum()),
                                      options);
    const auto clip = [&] {
      const auto norm = optimizer.clip_grad_norm_(0.1);
      if (variant.reads_norm) read(norm);
    };
    const double waits = train(net, optimizer, optimizer, group, where, variant, clip);
    return {on_cpu(net->parameters()), waits};
  };
}

Training fsdp(const std::function<void(FullyShardedDataParallelOptions&)>& change,
              Variant variant = {}) {
  return [change, variant](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    auto options = by_layer();
    change(options);
    FullyShardedDataParallel fsdp(net, group, options);
    torch::optim::SGD optimizer(fsdp.parameters(), momentum());
    const auto clip = [&] {
      const auto norm = fsdp.clip_grad_norm_(0.1);
      if (variant.reads_norm) read(norm);
    };
    const double waits = train(fsdp, optimizer, fsdp, group, where, variant, clip);
    return {whole_parameters(fsdp), waits};
  };
}

Training distributed_optimizer(const std::function<void(DistributedOptimizerOptions&)>& change,
                               Variant variant = {}) {
  return [change, variant](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    DistributedOptimizerOptions options{.reduce_method = "mean"};
    change(options);
    DistributedOptimizer optimizer(*net, group, optimizer_factory<torch::optim::SGD>(momentum()),
                                   options);
    const auto clip = [&] { clip_gradient_norm_(gradients(*net), 0.1); };
    const double waits = train(net, optimizer, optimizer, group, where, variant, clip);
    return {on_cpu(net->parameters()), waits};
  };
}

/// Its gradients arrive in another order in every second step.
struct TurningImpl : torch::nn::Module {
  TurningImpl() {
    for (const char* name : {"a", "b", "c", "d"})
      layers.push_back(register_module(name, torch::nn::Linear(3, 3)));
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i)
      x = layers[backwards ? layers.size() - 1 - i : i](x).tanh();
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  bool backwards = false;
};
TORCH_MODULE(Turning);

/// A pack that a backward does not follow is reduced gradient by gradient.
Outcome in_packs_that_are_not_followed(ProcessGroup group, at::Device where) {
  auto net = model_on<Turning>(where);
  DistributedOptimizer optimizer(
      *net, group, optimizer_factory<torch::optim::SGD>(momentum()),
      {.reduce_method = "mean", .param_pack = true, .param_pack_thd = 20});
  const auto batches = batches_of(kSteps, group.rank(), where);
  const double waits = waits_of_steps([&](int step) {
    optimizer.zero_grad();
    net->backwards = step % 2 == 1;
    auto loss = net(batches[step]).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  });
  return {on_cpu(net->parameters()), waits};
}

/// Computes in bfloat16, from and to float32.
struct ShortImpl : torch::nn::Module {
  ShortImpl() : net(register_module("net", testing::Uneven())) { net->to(at::kBFloat16); }
  at::Tensor forward(const at::Tensor& x) { return net(x.to(at::kBFloat16)).to(at::kFloat); }
  testing::Uneven net;
};
TORCH_MODULE(Short);

OptimizerFactory sgd_over_master_weights() {
  return with_master_weights(optimizer_factory<torch::optim::SGD>(momentum()));
}

Outcome master_weights_in_zero(ProcessGroup group, at::Device where) {
  auto net = model_on<Short>(where);
  ZeroRedundancyOptimizer optimizer(*net, group, sgd_over_master_weights());
  const double waits = train(net, optimizer, optimizer, group, where, {}, [] {});
  return {on_cpu(net->parameters()), waits};
}

Outcome master_weights_in_ddp(ProcessGroup group, at::Device where) {
  auto net = model_on<Short>(where);
  DistributedDataParallel ddp(net, group);
  const auto optimizer =
      sgd_over_master_weights()({torch::optim::OptimizerParamGroup(net->parameters())});
  const double waits = train(ddp, *optimizer, ddp, group, where, {}, [] {});
  return {on_cpu(net->parameters()), waits};
}

/// The bounds of waits would hold if nothing were counted.
TEST(DeviceStats, AnItemIsOneWaitOfTheHostAndAKernel) {
  expect_success(1, [](Groups&) {
    const auto x = torch::ones({64}, device());
    x.sum().item<float>();  // allocates, and loads the kernel
    reset_stats();
    x.sum().item<float>();
    const auto counted = stats();
    expect(counted.host_waits == 1, "1 wait, not " + std::to_string(counted.host_waits));
    expect(counted.kernels >= 1, "a kernel");
    synchronize();
    expect(stats().host_waits > 1, "a wait for the whole device");
  });
}

/// A batch is to travel through pinned memory.
TEST(DeviceStats, ACopyFromPageableMemoryIsAWaitOfTheHost) {
  expect_success(1, [](Groups&) {
    const auto x = torch::ones({64}), pinned = at::empty_like(x, x.options().pinned_memory(true));
    x.to(device());
    reset_stats();
    pinned.to(device(), /*non_blocking=*/true);
    expect(stats().host_waits == 0, "no wait for a copy from pinned memory");
    x.to(device());
    expect(stats().host_waits == 1, "1 wait, not " + std::to_string(stats().host_waits));
    synchronize();
  });
}

TEST_P(DeviceParity, HasTheValuesOfTheCpuAndFewWaits) { expect_parity(GetParam()); }

constexpr double kWaits = 2;
constexpr double kSixteenBits = 1e-2;  // tolerance

constexpr double kLossAlone = 1;
constexpr Variant kClipAndReadNothing{.clip = true, .reads_norm = false};
constexpr Variant kAccumulate{.accumulate = true}, kClip{.clip = true}, kTwice{.twice = true};
const auto kDefaults = [](auto&) {};
/// In buckets of one or two gradients.
const auto kShardGradients = [](auto& options) {
  options.shard_gradients = true;
  options.bucket_cap_mb = 1e-4;
};
/// Of one or two gradients each.
const auto kPacks = [](auto& options) {
  options.param_pack = true;
  options.param_pack_thd = 20;
};
const auto kSumsAndBroadcasts = [](auto& options) {
  options.reduce_method = "sum";
  options.bcast_period = 2;
};
const auto kLateGradients = [](auto& options) { options.overlap = Overlap::background; };
const auto kShardGradOp = [](auto& options) {
  options.sharding_strategy = ShardingStrategy::shard_grad_op;
};
/// Every rank has all parameters; the gradients are all-reduced.
const auto kReplicas = [](auto& options) {
  options.sharding_strategy = ShardingStrategy::no_shard;
};
const auto kHybrid = [](auto& options) {
  options.sharding_strategy = ShardingStrategy::hybrid_shard;
  options.shard_group_size = 2;
};
const auto kOffload = [](auto& options) { options.cpu_offload = true; };
const auto kOffloadHybrid = [](auto& options) {
  kOffload(options);
  kHybrid(options);
};
const auto kMixed = [](auto& options) {
  options.mixed_precision.param_dtype = at::kBFloat16;
  options.mixed_precision.reduce_dtype = at::kFloat;
};
/// Whole parameters in bfloat16 on each rank, and float32 ones that the optimizer updates.
const auto kMixedReplicas = [](auto& options) {
  kMixed(options);
  kReplicas(options);
};
const auto kMixedShardGradOp = [](auto& options) {
  kMixed(options);
  kShardGradOp(options);
};
/// Values are converted on their way in both directions.
const auto kOffloadMixed = [](auto& options) {
  kOffload(options);
  kMixed(options);
  options.mixed_precision.reduce_dtype = at::kBFloat16;
};

INSTANTIATE_TEST_SUITE_P(
    Wrappers, DeviceParity,
    ::testing::Values(
        Case{"ddp", ddp()}, Case{"ddp_accumulation", ddp(kAccumulate)},
        Case{"ddp_clip", ddp(kClip), false},
        Case{"ddp_clip_alone", ddp(kClipAndReadNothing), false, kLossAlone},
        Case{"zero_clip_alone", zero(kDefaults, kClipAndReadNothing), false, kLossAlone},
        Case{"fsdp_clip_alone", fsdp(kDefaults, kClipAndReadNothing), false, kLossAlone},
        Case{"zero", zero(kDefaults)}, Case{"zero_accumulation", zero(kDefaults, kAccumulate)},
        Case{"zero_clip", zero(kDefaults, kClip), false},
        Case{"zero_shard_gradients", zero(kShardGradients)},
        Case{"zero_shard_gradients_accumulation", zero(kShardGradients, kAccumulate)},
        Case{"zero_shard_gradients_twice", zero(kShardGradients, kTwice)},
        Case{"zero_shard_gradients_clip", zero(kShardGradients, kClip), false},
        Case{"master_weights_ddp", master_weights_in_ddp, true, kLossAlone, kWorlds, kSixteenBits},
        Case{"master_weights_zero", master_weights_in_zero, true, kLossAlone, kWorlds,
             kSixteenBits},
        Case{"distributed_optimizer", distributed_optimizer(kDefaults)},
        Case{"distributed_optimizer_accumulation", distributed_optimizer(kDefaults, kAccumulate)},
        Case{"distributed_optimizer_clip", distributed_optimizer(kDefaults, kClip), false},
        Case{"distributed_optimizer_packed", distributed_optimizer(kPacks)},
        Case{"distributed_optimizer_packed_accumulation",
             distributed_optimizer(kPacks, kAccumulate)},
        Case{"distributed_optimizer_packs_not_followed", in_packs_that_are_not_followed},
        Case{"distributed_optimizer_sum", distributed_optimizer(kSumsAndBroadcasts)},
        Case{"fsdp_replicas", fsdp(kReplicas)}, Case{"fsdp", fsdp(kDefaults)},
        Case{"fsdp_background", fsdp(kLateGradients)},
        Case{"fsdp_shard_grad_op", fsdp(kShardGradOp)},
        Case{"fsdp_accumulation", fsdp(kDefaults, kAccumulate)},
        Case{"fsdp_clip", fsdp(kDefaults, kClip), false},
        Case{"fsdp_mixed_precision", fsdp(kMixed), true, kWaits, kWorlds, kSixteenBits},
        Case{"fsdp_mixed_precision_replicas", fsdp(kMixedReplicas), true, kWaits, kWorlds,
             kSixteenBits},
        Case{"fsdp_mixed_precision_shard_grad_op", fsdp(kMixedShardGradOp), true, kWaits, kWorlds,
             kSixteenBits},
        Case{"fsdp_hybrid", fsdp(kHybrid), true, kWaits, {2, 4}},
        Case{"fsdp_hybrid_accumulation", fsdp(kHybrid, kAccumulate), true, kWaits, {2, 4}},
        // The host waits at the end of each backward that reduces.
        Case{"fsdp_cpu_offload", fsdp(kOffload)},
        Case{"fsdp_cpu_offload_clip", fsdp(kOffload, kClip), false},
        Case{"fsdp_cpu_offload_accumulation", fsdp(kOffload, kAccumulate)},
        Case{"fsdp_cpu_offload_twice", fsdp(kOffload, kTwice), true, kWaits + 1},
        Case{"fsdp_cpu_offload_mixed_precision", fsdp(kOffloadMixed), true, kWaits, kWorlds,
             kSixteenBits},
        Case{"fsdp_cpu_offload_hybrid", fsdp(kOffloadHybrid), true, kWaits, {2, 4}}),
    name_of_case);

}  // namespace
}  // namespace tessera::on_device
