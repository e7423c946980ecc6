// With shard_gradients a device's memory of gradients is given back within backward, and the
// reductions run beside computation.
#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

#include "device/expect_success.h"
#include "device/loss.h"
#include "device/tower.h"
#include "harness/device/rank_processes.h"
#include "harness/sim/sim.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/detail/device_generator.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::on_device {
namespace {

constexpr int64_t bytes_of_block(int width) {
  return (width * width + width) * static_cast<int64_t>(sizeof(float));
}

/// One block a bucket.
ZeroRedundancyOptimizerOptions sharded(int width) {
  ZeroRedundancyOptimizerOptions options;
  options.shard_gradients = true;
  options.bucket_cap_mb = static_cast<double>(bytes_of_block(width)) / (1 << 20);
  return options;
}

struct ZeroStep {
  Spent backward;
  int64_t bytes = 0;       // between steps
  int64_t peak_bytes = 0;  // of a step
  uint64_t host_waits = 0;
};

/// The third step, after which all memory has been allocated.
ZeroStep step_of(int blocks, int width, const ProcessGroup& group,
                 const ZeroRedundancyOptimizerOptions& options) {
  torch::manual_seed(1);
  Tower net(blocks, width);
  net->to(device());
  ZeroRedundancyOptimizer optimizer(*net, group, optimizer_factory<torch::optim::SGD>(0.1),
                                    options);
  const auto x = torch::ones({2, width}, device());
  ZeroStep step;
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    sim::reset_stats();
    step.bytes = sim::stats().bytes;
    {
      const auto loss = net(x).mean();
      step.backward = spent_in([&] { loss.backward(); });
    }
    optimizer.step();
    step.peak_bytes = sim::stats().peak_bytes;
    step.host_waits = sim::stats().host_waits;
  }
  return step;
}

TEST(DeviceMemory, ShardedGradientsAreGivenBackWithinBackward) {
  constexpr int kBlocks = 12, kSize = 64;
  for (const int world : {1, 2, 3}) {
    expect_success(
        world,
        [world](Groups& groups) {
          constexpr int64_t kBlock = bytes_of_block(kSize);
          constexpr int64_t kGradients = kBlocks * kBlock;
          auto group = groups.device();
          const auto whole = step_of(kBlocks, kSize, group, {});
          const auto lean = step_of(kBlocks, kSize, group, sharded(kSize));
          // Between steps there are the segments, and no bucket.
          const auto kept = kGradients / world + kBlocks * world * 512;  // rounded by the allocator
          expect(lean.bytes <= whole.bytes - kGradients + kept,
                 std::to_string(lean.bytes) + " bytes between steps, not " +
                     std::to_string(whole.bytes - kGradients + kept));
          // A bucket that is being reduced, with what the ranks send each other, the next one, and
          // the gradients that backward has produced since.
          const auto most = whole.peak_bytes - kGradients + kept + 4 * kBlock;
          expect(lean.peak_bytes <= most, std::to_string(lean.peak_bytes) +
                                              " bytes at the peak, not " + std::to_string(most));
        },
        1);
  }
}

TEST(DeviceMemory, ReductionsOfShardedGradientsRunBesideComputation) {
  constexpr int kShort = 4, kTall = 8, kSize = 4;
  for (const int world : {2, 3}) {
    expect_success(
        world,
        [](Groups& groups) {
          auto group = groups.device();
          const auto few = step_of(kShort, kSize, group, sharded(kSize)),
                     many = step_of(kTall, kSize, group, sharded(kSize));
          expect(many.backward.waiting <= few.backward.waiting,
                 "waits of backward: " + std::to_string(few.backward.waiting) + " units, and " +
                     std::to_string(many.backward.waiting) + " with more blocks");
          expect(many.host_waits == 0,
                 std::to_string(many.host_waits) + " waits of the host in a step");
        },
        1);
  }
}

/// A model of the CPU that FullyShardedDataParallel puts on the device.
TEST(DeviceMemory, ADeviceNeverHasTheWholeModel) {
  expect_success(
      3,
      [](Groups& groups) {
        constexpr int kBlocks = 12, kSize = 64;
        constexpr int64_t kBlock = bytes_of_block(kSize);
        auto group = groups.device();
        Tower net(kBlocks, kSize);
        FullyShardedDataParallelOptions options;
        options.wrap_policy = wrap_by_type<BlockImpl>();
        options.device = device();
        sim::reset_stats();
        const auto before = sim::stats().bytes;
        FullyShardedDataParallel fsdp(net, group, options);
        constexpr int64_t kRounding = 1024;
        const auto kept = kBlocks * (kBlock / group.size() + kRounding);  // of the allocator
        const auto peak = sim::stats().peak_bytes - before;
        expect(peak <= kept + 2 * kBlock, std::to_string(peak) + " bytes at the peak, not " +
                                              std::to_string(kept + 2 * kBlock));
      },
      1);
}

/// Its gradients come once for each use, because each use is differentiated by itself.
TEST(DeviceMemory, ASecondGradientForABucketWithoutMemoryIsAnError) {
  expect_success(2, [](Groups& groups) {
    constexpr int kSize = 4;
    detail::set_device_generator(type(), [](at::Device place) { return generator(place.index()); });
    Tower net(2, kSize);  // the second block is the first bucket
    net->to(device());
    ZeroRedundancyOptimizer optimizer(*net, groups.device(),
                                      optimizer_factory<torch::optim::SGD>(0.1), sharded(kSize));
    const auto use = [&](int i, const at::Tensor& x) {
      return checkpoint(
          [block = net->all[i].get()](const at::Tensor& in) { return block->forward(in); }, x);
    };
    const auto x = torch::ones({2, kSize}, device()).requires_grad_();
    const auto text = error_of([&] { use(1, use(0, use(1, x))).sum().backward(); });
    expect_contains(text, "got a second gradient in one backward");
  });
}

}  // namespace
}  // namespace tessera::on_device
