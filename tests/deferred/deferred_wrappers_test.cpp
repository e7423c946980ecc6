#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "deferred/trainings.h"
#include "harness/memory.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"

// Wrapped, a deferred module trains as an eager one does, bit by bit.

namespace tessera::testing {
namespace {

class DeferredTrainings : public ::testing::TestWithParam<std::tuple<int, Training>> {};

TEST_P(DeferredTrainings, AreThoseOverAnEagerModule) {
  const auto [world, training] = GetParam();
  const auto computed_before = deferred_stats().computed;
  run_ranks(world, [training = training](ProcessGroup group, int rank) {
    const auto eager = training(make_net(false, rank), group, rank);
    EXPECT_EQ(training(make_net(true, rank), group, rank), eager);
    // Ranks may construct in either way.
    EXPECT_EQ(training(make_net(rank % 2 == 0, rank), group, rank), eager);
  });
  EXPECT_EQ(deferred_stats().computed, computed_before) << "something was used by address";
}

INSTANTIATE_TEST_SUITE_P(Worlds, DeferredTrainings,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(&with_fsdp, &with_zero,
                                                              &with_shared_parameters, &with_ddp)));

/// Parameters of 4 MiB and one of 24 MiB: 152 MiB.
struct LargeImpl : torch::nn::Module {
  LargeImpl() {
    register_module("wide", torch::nn::Linear(torch::nn::LinearOptions(6144, 1024).bias(false)));
    for (int i = 0; i < 32; ++i)
      register_module("l" + std::to_string(i),
                      torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false)));
  }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Large);

[[maybe_unused]] const bool kFreedIsReturned = return_freed_blocks();
constexpr int64_t kLargest = 24 * kMiB, kParameters = 152 * kMiB;

/// Bytes by which this process has exceeded what it had before, while all ranks, which are its
/// threads, constructed a module and wrapped it.
int64_t peak_of_building(int world, bool deferred) {
  int64_t peak = 0;
  run_ranks(world, [&](ProcessGroup group, int rank) {
    group.barrier();
    static int64_t before;
    if (rank == 0) {
      ::malloc_trim(0);
      reset_peak();
      before = resident_bytes();
    }
    group.barrier();
    auto net = [&] {
      const std::lock_guard lock(random_weights);
      return deferred ? deferred_init([] { return Large(); }) : Large();
    }();
    group.barrier();
    FullyShardedDataParallelOptions options;
    options.wrap_policy = wrap_leaves();
    const FullyShardedDataParallel<Large> fsdp(net, group, options);
    group.barrier();
    if (rank == 0) peak = peak_bytes() - before;
    group.barrier();
  });
  return peak;
}

class DeferredMemory : public ::testing::TestWithParam<int> {};

// The shards of all ranks are the parameters once. All else is counted for each rank.
TEST_P(DeferredMemory, FsdpIsBuiltInTheMemoryOfItsShardsAndTheLargestParameter) {
  const int world = GetParam();
  const auto formula = kParameters + world * (kLargest + 64 * kMiB);
  const auto peak = peak_of_building(world, true), eager = peak_of_building(world, false);
  std::printf("world %d: peak %ld MiB, formula %ld MiB, eager %ld MiB\n", world, peak / kMiB,
              formula / kMiB, eager / kMiB);
  EXPECT_LE(peak, formula);
  EXPECT_GT(eager, formula) << "the test can fail";
}

INSTANTIATE_TEST_SUITE_P(Worlds, DeferredMemory, ::testing::Values(1, 2));

TEST(DeferredWrappers, AParameterThatCannotBeComputedIsAnErrorOnEveryRank) {
  for (const auto training : {&with_fsdp, &with_zero, &with_ddp}) {
    const auto errors = run_ranks_catching(2, [training](ProcessGroup group, int rank) {
      auto net = make_net(true, rank);
      if (rank == 0)
        ASSERT_TRUE(detail::load_later(net->hidden->weight, [](const at::Tensor&) {
          throw Error("the file has become shorter");
        }));
      training(net, group, rank);
    });
    for (const auto& error : errors) EXPECT_TRUE(error);
    expect_usage_errors(errors, "rank 0: the file has become shorter");
  }
}

}  // namespace
}  // namespace tessera::testing
