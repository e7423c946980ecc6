#include "tessera/step/sample_weight.h"

#include <functional>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/zero_redundancy_optimizer.h"

// Ranks with different numbers of samples, and loops that weigh their losses.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int kWeighedSteps = 3;

struct SmallNetImpl : torch::nn::Module {
  SmallNetImpl() {
    first = register_module("first", torch::nn::Linear(7, 5));
    last = register_module("last", torch::nn::Linear(5, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return last(first(x).tanh()); }
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(SmallNet);

/// 5, 2, 7 … samples, and none of a rank in turn.
int64_t count_of(int step, int rank, int world) {
  if (world > 1 && rank == (step + 1) % world) return 0;
  return 2 + (3 * rank + 5 * step) % 6;
}

at::Tensor samples_of(int step, int rank, int64_t count) {
  return at::randn({count, 7}, at::make_generator<at::CPUGeneratorImpl>(100 * step + rank));
}

at::Tensor loss_of(const at::Tensor& y) { return y.square().sum(1).mean(); }

OptimizerFactory small_adagrad() {
  return [](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<torch::optim::Adagrad>(std::move(groups),
                                                   torch::optim::AdagradOptions(0.05));
  };
}

/// One batch of the samples of all ranks.
std::vector<at::Tensor> train_at_once(int world) {
  auto net = seeded<SmallNet>(5);
  auto optimizer = small_adagrad()({torch::optim::OptimizerParamGroup(net->parameters())});
  for (int step = 0; step < kWeighedSteps; ++step) {
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world; ++rank)
      all.push_back(samples_of(step, rank, count_of(step, rank, world)));
    clear_gradients(net->parameters());
    loss_of(net(at::cat(all))).backward();
    optimizer->step();
  }
  return copies(net->parameters());
}

/// A rank's weighed loss. Without samples it computes with one that does not count.
at::Tensor weighed_loss(const std::function<at::Tensor(at::Tensor)>& forward, ProcessGroup group,
                        int step) {
  const auto count = count_of(step, group.rank(), group.size());
  const auto x = samples_of(step, group.rank(), std::max<int64_t>(count, 1));
  return loss_of(forward(x)) * sample_weight(std::move(group), count);
}

using TrainWeighed = std::function<std::vector<at::Tensor>(SmallNet net, ProcessGroup group)>;

void expect_weights(const std::string& name, const TrainWeighed& train) {
  for (int world = 1; world <= 4; ++world) {
    const auto plain = train_at_once(world);
    run_ranks(world, [&](ProcessGroup group, int) {
      expect_close(train(seeded<SmallNet>(5), group), plain, name + std::to_string(world));
    });
  }
}

TEST(SampleWeight, DistributedDataParallel) {
  expect_weights("ddp", [](SmallNet net, const ProcessGroup& group) {
    DistributedDataParallel ddp(net, group, {});
    auto optimizer = small_adagrad()({torch::optim::OptimizerParamGroup(net->parameters())});
    for (int step = 0; step < kWeighedSteps; ++step) {
      clear_gradients(net->parameters());
      weighed_loss([&](at::Tensor x) { return ddp(x); }, group, step).backward();
      optimizer->step();
    }
    return copies(net->parameters());
  });
}

TEST(SampleWeight, ZeroRedundancyOptimizer) {
  expect_weights("zero", [](SmallNet net, const ProcessGroup& group) {
    ZeroRedundancyOptimizer optimizer(*net, group, small_adagrad());
    for (int step = 0; step < kWeighedSteps; ++step) {
      optimizer.zero_grad();
      weighed_loss([&](at::Tensor x) { return net(x); }, group, step).backward();
      optimizer.step();
    }
    return copies(net->parameters());
  });
}

TEST(SampleWeight, DistributedOptimizer) {
  expect_weights("distributed_optimizer", [](SmallNet net, const ProcessGroup& group) {
    DistributedOptimizer optimizer(*net, group, small_adagrad(), {.reduce_method = "mean"});
    for (int step = 0; step < kWeighedSteps; ++step) {
      optimizer.zero_grad();
      optimizer.backward(weighed_loss([&](at::Tensor x) { return net(x); }, group, step));
      optimizer.step();
    }
    return copies(net->parameters());
  });
}

TEST(SampleWeight, FullyShardedDataParallel) {
  expect_weights("fsdp", [](SmallNet net, const ProcessGroup& group) {
    FullyShardedDataParallel fsdp(net, group, {.wrap_policy = wrap_leaves()});
    auto optimizer = small_adagrad()({torch::optim::OptimizerParamGroup(fsdp.parameters())});
    for (int step = 0; step < kWeighedSteps; ++step) {
      fsdp.zero_grad(true);
      weighed_loss([&](at::Tensor x) { return fsdp(x); }, group, step).backward();
      optimizer->step();
    }
    const auto whole = fsdp.summon_full_params();
    return copies(net->parameters());
  });
}

TEST(SampleWeight, IsOneForEqualNumbersAndZeroForNone) {
  run_ranks(3, [](ProcessGroup group, int rank) {
    EXPECT_EQ(sample_weight(group, 5), 1);
    EXPECT_EQ(sample_weight(group, 0), 0);
    EXPECT_EQ(sample_weight(group, rank), rank);
    group.reset_stats();
    sample_weight(group, 1 + rank);
    EXPECT_EQ(group.stats().all_reduce.calls, 1u);
  });
  EXPECT_EQ(sample_weight(ProcessGroup(), 3), 1);
}

TEST(SampleWeight, OfANegativeNumberIsAnErrorOnEveryRank) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    EXPECT_THAT(
        [&] { sample_weight(group, rank == 1 ? -4 : 3); },
        ThrowsMessage<UsageError>(HasSubstr(rank == 1 ? "rank 1: -4 samples; expected 0 or more"
                                                      : "rank 0: 3 samples, and fewer than 0 on")));
    EXPECT_EQ(sample_weight(group, 1), 1);  // the group goes on
  });
}

}  // namespace
