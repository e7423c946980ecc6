#include <gtest/gtest.h>

#include "deferred/bits.h"
#include "harness/memory.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

// Wrapped, a deferred module trains as an eager one does, bit by bit.

namespace tessera::testing {
namespace {

/// Tied and frozen weights, a buffer, sizes that no world size divides, large and small tensors.
struct NetImpl : torch::nn::Module {
  NetImpl() {
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
TORCH_MODULE(Net);

Net make_net(bool deferred, int rank) {
  const std::lock_guard lock(random_weights);
  torch::manual_seed(11 + rank);  // the values of rank 0 count
  return deferred ? deferred_init([] { return Net(); }) : Net();
}

at::Tensor tokens(int step, int rank) {
  return (torch::arange(24).reshape({2, 12}) * (7 + rank) + 13 * step) % 301;
}

using Weights = std::map<std::string, uint64_t>;
using Training = Weights (*)(Net net, ProcessGroup group, int rank);

template <class Forward, class Step>
void train(Forward&& forward, Step&& step, int rank) {
  for (int i = 0; i < 3; ++i) {
    forward(tokens(i, rank)).square().mean().backward();
    step();
  }
}

Weights with_fsdp(Net net, ProcessGroup group, int rank) {
  FullyShardedDataParallelOptions options;
  options.wrap_policy = wrap_leaves();
  FullyShardedDataParallel<Net> fsdp(net, group, options);
  torch::optim::Adam optimizer(fsdp.parameters(), 1e-3);
  train(
      fsdp,
      [&] {
        optimizer.step();
        optimizer.zero_grad();
      },
      rank);
  Weights weights;
  for (const auto& [name, tensor] : fsdp.state_dict(-1)) weights[name] = bits(tensor);
  return weights;
}

Weights weights_of(Net& net) {
  Weights weights;
  for (const auto& item : net->named_parameters()) weights[item.key()] = bits(item.value());
  for (const auto& item : net->named_buffers()) weights[item.key()] = bits(item.value());
  return weights;
}

Weights train_with_zero(Net& net, const ProcessGroup& group, int rank, bool share) {
  ZeroRedundancyOptimizer zero(*net, group, default_optimizers().factory("AdamW", {{"lr", 1e-3}}),
                               {.share_parameters = share});
  train([&](const at::Tensor& x) { return net(x); },
        [&] {
          zero.step();
          zero.zero_grad();
        },
        rank);
  return weights_of(net);
}

Weights with_zero(Net net, ProcessGroup group, int rank) {
  return train_with_zero(net, group, rank, false);
}

Weights with_shared_parameters(Net net, ProcessGroup group, int rank) {
  return train_with_zero(net, group, rank, true);
}

Weights with_ddp(Net net, ProcessGroup group, int rank) {
  DistributedDataParallel<Net> ddp(net, group);
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
      if (rank == 0) {
        ASSERT_TRUE(detail::load_later(net->hidden->weight, [](const at::Tensor&) {
          throw Error("the file has become shorter");
        }));
      }
      training(net, group, rank);
    });
    for (const auto& error : errors) EXPECT_TRUE(error);
    expect_usage_errors(errors, "rank 0: the file has become shorter");
  }
}

}  // namespace
}  // namespace tessera::testing
