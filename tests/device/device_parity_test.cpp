// The wrappers on the simulated device: the bits of the CPU, and few waits of the host.
#include <functional>

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>

#include "device/batch.h"
#include "harness/models.h"
#include "harness/sim/rank_processes.h"
#include "harness/sim/sim.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/step/clip_grad.h"
#include "tessera/step/comm_hook.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::sim {
namespace {

using ::testing::Each;
using testing::Uneven;

constexpr int kSteps = 4;

struct Outcome {
  std::vector<at::Tensor> parameters;
  double waits_a_step = 0;
};

struct Variant {
  bool accumulate = false;  // two backwards a step, the first one under no_sync()
  bool clip = false;
};

/// Trains, and reads the loss in each step. Returns the host's waits of a step, without the first
/// one, which allocates.
template <class Model, class Optimizer, class Wrapper>
double train(Model& model, Optimizer& optimizer, Wrapper& wrapper, const ProcessGroup& group,
             at::Device where, Variant variant, const std::function<void()>& clip) {
  std::vector<at::Tensor> batches;
  for (int i = 0; i < 2 * kSteps; ++i) batches.push_back(batch(i, group.rank(), where));
  const auto loss_of = [&](int i) { return (model(batches[i]) - 0.5).square().mean(); };
  for (int step = 0; step < kSteps; ++step) {
    if (step == 1) reset_stats();
    optimizer.zero_grad();
    if (variant.accumulate) {
      const auto scope = wrapper.no_sync();
      loss_of(kSteps + step).backward();
    }
    auto loss = loss_of(step);
    loss.backward();
    if (variant.clip) clip();
    optimizer.step();
    loss.template item<float>();
  }
  return static_cast<double>(stats().host_waits) / (kSteps - 1);
}

std::vector<at::Tensor> gradients(const torch::nn::Module& net) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : net.parameters()) result.push_back(parameter.grad());
  return result;
}

std::vector<at::Tensor> on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().cpu());
  return result;
}

using Training = std::function<Outcome(ProcessGroup, at::Device)>;

Uneven model_on(at::Device where) {
  torch::manual_seed(1);
  Uneven net;
  net->to(where);
  return net;
}

Training ddp(Variant variant = {}) {
  return [variant](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    DistributedDataParallel ddp(net, group);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto clip = [&] { clip_gradient_norm_(gradients(*net), 0.1); };
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
    ZeroRedundancyOptimizer optimizer(
        *net, group,
        optimizer_factory<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)), options);
    const auto clip = [&] { optimizer.clip_grad_norm_(0.1); };
    const double waits = train(net, optimizer, optimizer, group, where, variant, clip);
    return {on_cpu(net->parameters()), waits};
  };
}

Training ddp_with_hook() {
  return [](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    DistributedDataParallelOptions options;
    options.comm_hook = bf16_compress_hook();
    DistributedDataParallel ddp(net, group, options);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const double waits = train(ddp, optimizer, ddp, group, where, {}, [] {});
    return {on_cpu(net->parameters()), waits};
  };
}

FullyShardedDataParallelOptions by_layer() {
  FullyShardedDataParallelOptions options;
  options.wrap_policy = wrap_by_type<torch::nn::LinearImpl>();
  return options;
}

Training fsdp(const std::function<void(FullyShardedDataParallelOptions&)>& change,
              Variant variant = {}) {
  return [change, variant](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    auto options = by_layer();
    change(options);
    FullyShardedDataParallel fsdp(net, group, options);
    torch::optim::SGD optimizer(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const auto clip = [&] { fsdp.clip_grad_norm_(0.1); };
    const double waits = train(fsdp, optimizer, fsdp, group, where, variant, clip);
    std::vector<at::Tensor> parameters;
    for (const auto& [name, tensor] : fsdp.state_dict(-1)) parameters.push_back(tensor.cpu());
    return {parameters, waits};
  };
}

struct Case {
  const char* name;
  Training train;
  /// A norm is added up by another kernel on a device than on the CPU.
  bool same_bits = true;
};

void PrintTo(const Case& test_case, std::ostream* out) { *out << test_case.name; }

constexpr double kWaits = 2;  // of the host, at most in a step: the loss, and a norm

void compare(const Outcome& host, const Outcome& there, bool same_bits) {
  expect(!host.parameters.empty() && host.parameters.size() == there.parameters.size(),
         "equally many parameters");
  for (size_t i = 0; i < host.parameters.size(); ++i) {
    const auto &a = host.parameters[i], &b = there.parameters[i];
    expect(same_bits ? a.equal(b) : a.allclose(b, 1e-6, 1e-7),
           "the values of parameter " + std::to_string(i));
  }
}

class DeviceParity : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceParity, HasTheValuesOfTheCpuAndFewWaits) {
  const auto& training = GetParam();
  for (const int world : {1, 2, 3}) {
    for (int seed = 1; seed <= 2; ++seed) {  // with and without checks
      const auto errors = run_processes(world, seed, [&](Groups& groups) {
        ProcessGroupOptions options;
        options.check_collectives = seed % 2 == 1;
        const c10::DeviceGuard own(device(groups.rank()));
        const auto host = training.train(groups.cpu(options), at::kCPU);
        const auto there = training.train(groups.device(options), device(groups.rank()));
        std::string reasons;
        for (const auto& reason : stats().wait_reasons) reasons += " " + reason;
        compare(host, there, training.same_bits);
        expect(there.waits_a_step <= kWaits,
               "at most " + std::to_string(kWaits) + " waits a step, not " +
                   std::to_string(there.waits_a_step) + ":" + reasons);
      });
      EXPECT_THAT(errors, Each("")) << world << " ranks, seed " << seed;
    }
  }
}

constexpr Variant kAccumulate{.accumulate = true}, kClip{.clip = true};
const auto kDefaults = [](auto&) {};
const auto kOverlap = [](auto& options) { options.overlap_with_backward = true; };
const auto kPrefetch = [](auto& options) { options.forward_prefetch = true; };
const auto kShardGradOp = [](auto& options) {
  options.sharding_strategy = ShardingStrategy::shard_grad_op;
};
/// Every rank has all parameters; the gradients are all-reduced.
const auto kReplicas = [](auto& options) {
  options.sharding_strategy = ShardingStrategy::no_shard;
};
const auto kMixed = [](auto& options) {
  options.mixed_precision.param_dtype = at::kBFloat16;
  options.mixed_precision.reduce_dtype = at::kFloat;
};

INSTANTIATE_TEST_SUITE_P(
    Wrappers, DeviceParity,
    ::testing::Values(Case{"ddp", ddp()}, Case{"ddp_accumulation", ddp(kAccumulate)},
                      Case{"ddp_clip", ddp(kClip), false}, Case{"zero", zero(kDefaults)},
                      Case{"zero_accumulation", zero(kDefaults, kAccumulate)},
                      Case{"zero_clip", zero(kDefaults, kClip), false},
                      Case{"zero_overlap", zero(kOverlap)}, Case{"ddp_hook", ddp_with_hook()},
                      Case{"fsdp_replicas", fsdp(kReplicas)}, Case{"fsdp", fsdp(kDefaults)},
                      Case{"fsdp_prefetch", fsdp(kPrefetch)},
                      Case{"fsdp_shard_grad_op", fsdp(kShardGradOp)},
                      Case{"fsdp_accumulation", fsdp(kDefaults, kAccumulate)},
                      Case{"fsdp_clip", fsdp(kDefaults, kClip), false},
                      Case{"fsdp_mixed_precision", fsdp(kMixed)}),
    [](const auto& test_case) { return std::string(test_case.param.name); });

}  // namespace
}  // namespace tessera::sim
