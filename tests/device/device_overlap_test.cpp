// What runs beside computation with FullyShardedDataParallel, in the virtual time of the simulated
// device, and that the host never waits for it.
#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include "device/expect_success.h"
#include "device/tower.h"
#include "harness/device/rank_processes.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace tessera::on_device {
namespace {

constexpr int kWidth = 4;

struct Step {
  Spent forward, backward;
  uint64_t host_waits = 0;
  int64_t peak_units = 0;  // gathered at the same time
};

FullyShardedDataParallelOptions options_of(ShardingStrategy strategy) {
  FullyShardedDataParallelOptions options;
  options.wrap_policy = wrap_by_type<BlockImpl>();
  options.sharding_strategy = strategy;
  return options;
}

/// The third step, in which the order of use is known and all memory has been allocated.
Step step_of(int blocks, const ProcessGroup& group, FullyShardedDataParallelOptions options) {
  torch::manual_seed(1);
  Tower net(blocks, kWidth);
  net->to(device());
  FullyShardedDataParallel fsdp(net, group, options);
  torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
  const auto x = torch::ones({2, kWidth}, device());
  Step step;
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    at::Tensor loss;
    fsdp.reset_stats();
    reset_stats();
    step.forward = spent_in([&] { loss = fsdp(x).mean(); });
    step.backward = spent_in([&] { loss.backward(); });
    optimizer.step();
    step.host_waits = stats().host_waits;
  }
  constexpr int64_t kUnitBytes = (kWidth * kWidth + kWidth) * sizeof(float);
  step.peak_units = (fsdp.stats().peak_gathered_bytes + kUnitBytes - 1) / kUnitBytes;
  return step;
}

uint64_t kernels_of_forward(int blocks) {
  Tower net(blocks, kWidth);
  net->to(device());
  return spent_in([&] { net(torch::ones({2, kWidth}, device())).mean(); }).busy;
}

constexpr int kFewUnits = 4, kManyUnits = 8;

void expect_at_most(uint64_t value, uint64_t most, const std::string& what) {
  expect(value <= most,
         what + ": at most " + std::to_string(most) + ", not " + std::to_string(value));
}

/// What the compute stream waits for is one gather and one reduction, however many units there are.
void expect_overlap(const ProcessGroup& group, const FullyShardedDataParallelOptions& options) {
  const auto few = step_of(kFewUnits, group, options), many = step_of(kManyUnits, group, options);
  expect_at_most(many.forward.waiting, few.forward.waiting, "waits of forward");
  expect_at_most(many.backward.waiting, few.backward.waiting, "waits of backward");
  expect_at_most(many.host_waits, 0, "waits of the host");
  expect_at_most(many.peak_units, 2, "units gathered at the same time");
}

TEST(DeviceOverlap, GathersRunBesideComputation) {
  for (const int world : {2, 3}) {
    expect_success(
        world,
        [](Groups& groups) {
          const auto options = options_of(ShardingStrategy::full_shard);
          auto group = groups.device();
          expect_overlap(group, options);
          // The copy of a rank's own part is on the stream of gathers too. The batch is a kernel.
          expect_at_most(step_of(kManyUnits, group, options).forward.busy + 1,
                         kernels_of_forward(kManyUnits),
                         "kernels of forward on the compute stream");
        },
        1);
  }
}

TEST(DeviceOverlap, ConversionsRunBesideComputation) {
  expect_success(
      1,
      [](Groups& groups) {
        auto options = options_of(ShardingStrategy::full_shard);
        options.mixed_precision.param_dtype = at::kBFloat16;
        expect_overlap(groups.device(), options);
      },
      1);
}

TEST(DeviceOverlap, ReductionsOfHybridShardingRunBesideComputation) {
  expect_success(
      4,
      [](Groups& groups) {
        auto options = options_of(ShardingStrategy::hybrid_shard);
        options.shard_group_size = 2;
        expect_overlap(groups.device(), options);
      },
      1);
}

}  // namespace
}  // namespace tessera::on_device
