#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"

// Parameters that stay whole, each on one rank, for optimizers that need more than one element.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

/// Divides each row of a gradient by a running mean of its norm, which is correct only on a whole
/// parameter.
struct RowOptions : torch::optim::OptimizerCloneableOptions<RowOptions> {
  double rate = 0.05;
  double get_lr() const override { return rate; }
  void set_lr(double lr) override { rate = lr; }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("lr", c10::IValue(rate));
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    c10::IValue value;
    archive.read("lr", value);
    rate = value.toDouble();
  }
};

struct RowState : torch::optim::OptimizerCloneableParamState<RowState> {
  at::Tensor norms, average;
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("norms", norms, true);
    archive.write("average", average, true);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    archive.read("norms", norms, true);
    archive.read("average", average, true);
  }
};

class RowScaled : public torch::optim::Optimizer {
 public:
  explicit RowScaled(std::vector<at::Tensor> parameters)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parameters))},
                  std::make_unique<RowOptions>()) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    const at::NoGradGuard no_grad;
    for (auto& p : param_groups_[0].params()) {
      if (!p.grad().defined() || p.numel() == 0) continue;
      auto& slot = state_[compat::state_key(p)];
      if (!slot) slot = std::make_unique<RowState>();
      auto& state = static_cast<RowState&>(*slot);
      const auto norms = p.grad().reshape({p.size(0), -1}).norm(2, 1) + 1e-2;
      state.norms = state.norms.defined() ? state.norms * 0.5 + norms * 0.5 : norms;
      std::vector<int64_t> column(p.dim(), 1);
      column[0] = p.size(0);
      const auto scaled = p.grad() / state.norms.view(column);
      state.average = state.average.defined() ? state.average * 0.5 + scaled : scaled;
      p.sub_(state.average, param_groups_[0].options().get_lr());
    }
    return {};
  }
};

FullyShardedDataParallelOptions whole(Partition partition, bool leaves) {
  FullyShardedDataParallelOptions options;
  if (leaves) options.wrap_policy = wrap_leaves();
  options.partition = partition;
  return options;
}

/// A model without batch statistics and with one weight in another memory order.
ResNet without_statistics() {
  auto net = seeded<ResNet>(3);
  net->eval();
  net->stem->weight.set_data(net->stem->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  return net;
}

TEST(FsdpWhole, AnOptimizerOverWholeParametersEqualsThePlainOne) {
  auto plain = without_statistics();
  RowScaled reference(plain->parameters());
  train(plain, reference, 0, 10);
  for (int world = 1; world <= 4; ++world) {
    for (const auto partition : {Partition::whole, Partition::first_fit}) {
      for (const bool leaves : {true, false}) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = without_statistics();
          FullyShardedDataParallel fsdp(net, group, whole(partition, leaves));
          RowScaled optimizer(fsdp.parameters());
          fsdp.check_optimizer(optimizer);
          train(fsdp, optimizer, 0, 10, rank, world);
          const auto parameters = plain->named_parameters();
          for (auto& [name, value] : fsdp.state_dict(-1)) {
            const auto* expected = parameters.find(name);
            if (expected)
              ASSERT_TRUE(at::allclose(value, *expected, 1e-5, 1e-6))
                  << name << " world " << world << " off by " << (value - *expected).abs().max();
          }
        });
      }
    }
  }
}

TEST(FsdpWhole, EachParameterIsOnOneRankInItsShape) {
  for (int world = 1; world <= 4; ++world) {
    for (const bool leaves : {true, false}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = without_statistics(), plain = without_statistics();
        FullyShardedDataParallel fsdp(net, group, whole(Partition::whole, leaves));
        int64_t total = 0, largest = 0;
        std::vector<int64_t> mine;
        for (const auto& [name, shard] : fsdp.named_parameters()) {
          const at::Tensor parameter = plain->named_parameters()[name];
          total += parameter.numel();
          largest = std::max(largest, parameter.numel());
          mine.push_back(shard.numel() > 0);
          if (shard.numel() == 0) continue;
          EXPECT_EQ(shard.sizes(), parameter.sizes()) << name;
          EXPECT_EQ(shard.strides(), parameter.strides()) << name;
          EXPECT_TRUE(at::equal(shard, parameter)) << name;
        }
        auto owners = at::tensor(mine);
        group.all_reduce(owners);
        EXPECT_TRUE(owners.eq(1).all().item<bool>()) << owners;
        EXPECT_LE(fsdp.memory().parameters, 4 * (total / world + largest));
        fsdp.reset_stats();
        group.reset_stats();
        net->eval();
        fsdp(rgb_images(0, rank, world)).square().mean().backward();
        EXPECT_LE(fsdp.memory().gradients, 4 * (total / world + largest));
        uint64_t units = 0;
        for (const auto& unit : fsdp.units()) units += unit.numel > 0;
        EXPECT_EQ(fsdp.stats().reductions, units);
        if (world > 1) {
          EXPECT_EQ(group.stats().reduce_scatter.calls, units);
          EXPECT_EQ(group.stats().all_gather.calls,
                    fsdp.stats().gathers_forward + fsdp.stats().gathers_backward);
        }
      });
    }
  }
}

TEST(FsdpWhole, WeightsAndStateGoToOtherWorldsAndThePlainOptimizer) {
  auto plain = without_statistics();
  RowScaled reference(plain->parameters());
  declare_state<RowScaled, RowState>();
  train(plain, reference, 0, 5);
  for (const auto& [from, to] : std::vector<std::pair<int, int>>{{1, 3}, {3, 2}, {2, 4}, {4, 1}}) {
    OptimizerStateDict saved;
    std::vector<std::pair<std::string, at::Tensor>> weights;
    run_ranks(from, [&](ProcessGroup group, int rank) {
      auto net = without_statistics();
      FullyShardedDataParallel fsdp(net, group, whole(Partition::whole, true));
      RowScaled optimizer(fsdp.parameters());
      train(fsdp, optimizer, 0, 3, rank, from);
      auto dict = fsdp.optim_state_dict(optimizer);
      auto state = fsdp.state_dict();
      if (rank == 0) saved = dict, weights = state;
    });
    EXPECT_EQ(saved.state.at("stem.weight").tensors.at("average").sizes(),
              plain->stem->weight.sizes());
    EXPECT_EQ(saved.state.at("stem.weight").tensors.at("norms").sizes(), at::IntArrayRef({5}));
    run_ranks(to, [&](ProcessGroup group, int rank) {
      auto net = without_statistics();
      FullyShardedDataParallel fsdp(net, group, whole(Partition::whole, false));
      RowScaled optimizer(fsdp.parameters());
      fsdp.load_state_dict(weights);
      fsdp.load_optim_state_dict(optimizer, saved);
      train(fsdp, optimizer, 3, 5, rank, to);
      const auto parameters = plain->named_parameters();
      for (auto& [name, value] : fsdp.state_dict(-1)) {
        const auto* expected = parameters.find(name);
        if (expected)
          ASSERT_TRUE(at::allclose(value, *expected, 1e-5, 1e-6))
              << name << " from " << from << " to " << to;
      }
    });
    auto again = without_statistics();
    RowScaled alone(again->parameters());
    load_state_dict(alone, named_parameters(*again), saved);
    const auto back = state_dict(alone, named_parameters(*again));
    for (const auto& [name, state] : saved.state)
      for (const auto& [key, tensor] : state.tensors)
        EXPECT_TRUE(at::equal(back.state.at(name).tensors.at(key), tensor)) << name << " " << key;
  }
}

TEST(FsdpWhole, LbfgsRunsWithNoShard) {
  const auto options = torch::optim::LBFGSOptions(0.5).max_iter(5);
  auto plain = seeded<Chain>(1);
  torch::optim::LBFGS reference(plain->parameters(), options);
  for (int i = 0; i < 3; ++i) {
    reference.step([&] {
      reference.zero_grad();
      auto loss = loss_of(plain(rows(i)));
      loss.backward();
      return loss;
    });
  }
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto sharding = every_leaf();
      sharding.sharding_strategy = ShardingStrategy::no_shard;
      FullyShardedDataParallel fsdp(seeded<Chain>(1), group, sharding);
      torch::optim::LBFGS optimizer(fsdp.parameters(), options);
      fsdp.check_optimizer(optimizer);
      for (int i = 0; i < 3; ++i)
        optimizer.step([&] {
          optimizer.zero_grad();
          auto loss = loss_of(fsdp(rows(i, rank, world)));
          loss.backward();
          loss = loss.detach();
          group.all_reduce(loss, 1.0 / world);
          return loss;
        });
      const auto parameters = plain->named_parameters();
      for (auto& [name, value] : fsdp.state_dict(-1))
        EXPECT_TRUE(at::allclose(value, parameters[name], 1e-4, 1e-5))
            << name << " world " << world;
    });
  }
}

TEST(FsdpWhole, UnsuitableOptimizersAreRefused) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    FullyShardedDataParallel cut(seeded<Chain>(1), group, every_leaf());
    RowScaled by_row(cut.parameters());
    EXPECT_THAT(thrown_by([&] { cut.check_optimizer(by_row); }),
                HasSubstr("option partition whole"));
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, whole(Partition::whole, true));
    torch::optim::LBFGS lbfgs(fsdp.parameters());
    EXPECT_THAT(thrown_by([&] { fsdp.check_optimizer(lbfgs); }),
                HasSubstr("LBFGS uses all parameters at once"));
    EXPECT_THAT(thrown_by([&] {
                  FullyShardedDataParallel(
                      seeded<Chain>(1), group,
                      whole(rank == 0 ? Partition::whole : Partition::flat, true));
                }),
                HasSubstr("partition whole"));
  });
}

}  // namespace
