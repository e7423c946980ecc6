#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "local_sgd/simulation.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::testing::local {
namespace {

/// One rank of two groups of two, with a wrapper in its group.
struct Inner {
  virtual ~Inner() = default;
  virtual void iteration(const at::Tensor& x) = 0;
  virtual at::Tensor parameters() { return flat(net->parameters()); }
  Uneven net = seeded<Uneven>(1);
  std::unique_ptr<LocalSgd> local;
};

struct InnerDdp : Inner {
  InnerDdp(ProcessGroup& world, LocalSgdOptions options, Overlap overlap = Overlap::backward)
      : groups(local_sgd_groups(world, 2)) {
    ddp = std::make_unique<DistributedDataParallel<Uneven>>(
        net, groups.inner, DistributedDataParallelOptions{.overlap = overlap});
    optimizer = inner_optimizer(net);
    local = std::make_unique<LocalSgd>(groups.outer, shards_of(*net), options, groups.inner);
    local->set_join(world, {*ddp}, [this] {
      optimizer->zero_grad();
      ddp->shadow_backward();
      optimizer->step();
    });
  }
  void iteration(const at::Tensor& x) override {
    optimizer->zero_grad();
    loss_of((*ddp)(x)).backward();
    optimizer->step();
    local->step();
  }
  LocalSgdGroups groups;
  std::unique_ptr<DistributedDataParallel<Uneven>> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

struct InnerZero : Inner {
  InnerZero(ProcessGroup& world, LocalSgdOptions options,
            const ZeroRedundancyOptimizerOptions& zero_options = {})
      : groups(local_sgd_groups(world, 2)) {
    zero = std::make_unique<ZeroRedundancyOptimizer>(*net, groups.inner, adamw_factory(),
                                                     zero_options);
    local = std::make_unique<LocalSgd>(
        groups.outer, zero->shards(), options, ProcessGroup(),
        [this] { zero->gather_parameters(); }, [this] { zero->wait_for_readers(); });
    local->set_join(world, {*zero});
  }
  void iteration(const at::Tensor& x) override {
    zero->zero_grad();
    loss_of(net(x)).backward();
    zero->step();
    local->step();
  }
  LocalSgdGroups groups;
  std::unique_ptr<ZeroRedundancyOptimizer> zero;
};

struct InnerFsdp : Inner {
  InnerFsdp(ProcessGroup& world, LocalSgdOptions options) : groups(local_sgd_groups(world, 2)) {
    fsdp = std::make_unique<FullyShardedDataParallel<Uneven>>(
        net, groups.inner, FullyShardedDataParallelOptions{.wrap_policy = wrap_leaves()});
    optimizer = adamw(fsdp->parameters());
    local = std::make_unique<LocalSgd>(groups.outer, fsdp->shards(), options);
    fsdp->set_shadow_step([this] {
      optimizer->zero_grad();
      fsdp->shadow_backward();
      optimizer->step();
    });
    local->set_join(world, {*fsdp});
  }
  void iteration(const at::Tensor& x) override {
    optimizer->zero_grad();
    loss_of((*fsdp)(x)).backward();
    optimizer->step();
    local->step();
  }
  at::Tensor parameters() override {
    const auto whole = fsdp->summon_full_params("", false);
    return flat(net->parameters());
  }
  LocalSgdGroups groups;
  std::unique_ptr<FullyShardedDataParallel<Uneven>> fsdp;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

using Make = std::function<std::unique_ptr<Inner>(ProcessGroup&, LocalSgdOptions)>;

template <class Type>
std::pair<std::string, Make> wrapper(const std::string& name) {
  return {name, [](ProcessGroup& world, LocalSgdOptions options) {
            return std::make_unique<Type>(world, options);
          }};
}

std::pair<std::string, Make> zero(const std::string& name,
                                  const ZeroRedundancyOptimizerOptions& zero_options) {
  return {name, [zero_options](ProcessGroup& world, LocalSgdOptions options) {
            return std::make_unique<InnerZero>(world, options, zero_options);
          }};
}

std::vector<std::pair<std::string, Make>> wrappers() {
  const Make in_background = [](ProcessGroup& world, LocalSgdOptions options) {
    return std::make_unique<InnerDdp>(world, options, Overlap::background);
  };
  return {wrapper<InnerDdp>("DDP"),
          {"DDP, steps in background", in_background},
          wrapper<InnerZero>("ZeRO"),
          zero("ZeRO, shared parameters", {.share_parameters = true}),
          zero("ZeRO, gathered in background", {.overlap = Overlap::background}),
          wrapper<InnerFsdp>("FSDP")};
}

/// A simulated group takes the mean loss of its ranks that have a batch.
Simulation::Train group_of_two(const std::vector<int>& batches) {
  return [batches](Uneven& net, torch::optim::Optimizer& optimizer, int step, int group) {
    std::vector<at::Tensor> losses;
    for (const int rank : {2 * group, 2 * group + 1})
      if (step < batches[static_cast<size_t>(rank)])
        losses.push_back(loss_of(net(own_rows(step, rank))));
    if (losses.empty()) return;
    optimizer.zero_grad();
    at::stack(losses).mean().backward();
    optimizer.step();
  };
}

TEST(LocalSgdInner, TwoGroupsOfTwoTrainAsTheSimulation) {
  constexpr int kInnerSteps = 7;
  for (const auto& [name, make] : wrappers()) {
    for (const auto& tested : cases(3)) {
      const auto where = name + ", " + tested.name;
      Simulation expected(2, tested.options,
                          group_of_two({kInnerSteps, kInnerSteps, kInnerSteps, kInnerSteps}));
      expected.run(kInnerSteps);
      std::vector<at::Tensor> before(4), after(4);
      run_ranks(4, [&, &make = make](ProcessGroup world, int rank) {
        const auto inner = make(world, tested.options);
        for (int step = 0; step < kInnerSteps; ++step) inner->iteration(own_rows(step, rank));
        before[rank] = inner->parameters();
        inner->local->synchronize();
        after[rank] = inner->parameters();
      });
      const double tolerance = tested.options.wire == OuterWire::int8 ? 2e-2 : 1e-4;
      for (int rank = 0; rank < 4; ++rank) {
        expect_near(before[rank], expected.parameters(rank / 2), tolerance, where);
        EXPECT_TRUE(at::equal(before[rank], before[rank / 2 * 2])) << where;
        EXPECT_TRUE(at::equal(after[rank], after[0])) << where;
      }
    }
  }
}

TEST(LocalSgdInner, EachValueLeavesAGroupOnce) {
  for (const auto& [name, make] : wrappers()) {
    std::vector<uint64_t> sent(4);
    int64_t numel = 0;
    run_ranks(4, [&, &make = make](ProcessGroup world, int rank) {
      const auto inner = make(world, {.sync_every = 1});
      ProcessGroup outer = inner->local->join_group();
      if (auto* ddp = dynamic_cast<InnerDdp*>(inner.get())) outer = ddp->groups.outer;
      if (auto* zero = dynamic_cast<InnerZero*>(inner.get())) outer = zero->groups.outer;
      if (auto* fsdp = dynamic_cast<InnerFsdp*>(inner.get())) outer = fsdp->groups.outer;
      outer.reset_stats();
      inner->iteration(own_rows(0, rank));
      sent[rank] = outer.stats().payload_sent();
      const auto whole = inner->parameters();
      if (rank == 0) numel = whole.numel();
    });
    EXPECT_EQ(sent[0] + sent[1], 4 * static_cast<uint64_t>(numel)) << name;
    EXPECT_EQ(sent[2] + sent[3], 4 * static_cast<uint64_t>(numel)) << name;
  }
}

TEST(LocalSgdJoin, RanksAndGroupsWithoutDataTakePart) {
  // Rank 3 ends first, then its whole group, then rank 1.
  for (const std::vector<int>& batches : {std::vector<int>{8, 5, 4, 2}, {2, 2, 5, 8}}) {
    for (const auto& [name, make] : wrappers()) {
      for (const bool background : {false, true}) {
        const LocalSgdOptions options{
            .sync_every = 3, .overlap = background ? Overlap::background : Overlap::backward};
        Simulation expected(2, options, group_of_two(batches));
        expected.run(8);
        expected.synchronize();
        std::vector<at::Tensor> after(4);
        run_ranks(4, [&, &make = make](ProcessGroup world, int rank) {
          const auto inner = make(world, options);
          JoinOptions join_options;
          join_options.divide_by_initial_world_size = false;
          join({*inner->local}, join_options, [&](JoinLoop& loop) {
            for (int step = 0; step < batches[static_cast<size_t>(rank)]; ++step) {
              loop.next();
              inner->iteration(own_rows(step, rank));
            }
          });
          inner->local->synchronize();
          after[rank] = inner->parameters();
        });
        for (int rank = 0; rank < 4; ++rank) {
          expect_near(after[rank], expected.parameters(0), 1e-4, name);
          EXPECT_TRUE(at::equal(after[rank], after[0])) << name << ", rank " << rank;
        }
      }
    }
  }
}

TEST(LocalSgdJoin, WithoutInnerGroupsARankWithoutDataStillSynchronises) {
  const std::vector<int> batches{7, 2};
  Simulation expected(2, {.sync_every = 2}, [&](Uneven& net, auto& optimizer, int step, int rank) {
    if (step < batches[static_cast<size_t>(rank)]) train_on(net, optimizer, own_rows(step, rank));
  });
  expected.run(7);
  run_ranks(2, [&](ProcessGroup world, int rank) {
    auto net = seeded<Uneven>(1);
    const auto optimizer = inner_optimizer(net);
    LocalSgd local(world, shards_of(*net), {.sync_every = 2});
    join({local}, {}, [&](JoinLoop& loop) {
      for (int step = 0; step < batches[static_cast<size_t>(rank)]; ++step) {
        loop.next();
        train_on(net, *optimizer, own_rows(step, rank));
        local.step();
      }
    });
    expect_near(flat(net->parameters()), expected.parameters(rank), 2e-5, "two ranks");
    EXPECT_EQ(local.steps(), 7);
  });
}

TEST(LocalSgdInner, ShardsOfADestroyedOptimizerAreAnErrorOnAllRanks) {
  run_ranks(2, [](ProcessGroup world, int rank) {
    auto net = seeded<Uneven>(1);
    auto zero =
        std::make_unique<ZeroRedundancyOptimizer>(*net, *world.split(rank), adamw_factory());
    LocalSgd local(world, zero->shards(), {.sync_every = 1});
    local.step();
    zero.reset();
    const auto text = thrown_by([&] { local.step(); });
    EXPECT_THAT(text, ::testing::HasSubstr("nothing else has the tensor of parameter"));
    EXPECT_THAT(text, ::testing::HasSubstr("a new LocalSgd with the optimizer's shards()"));
  });
}

TEST(LocalSgdInner, ALayerOfZeroThatIsFrozenStaysSynchronised) {
  run_ranks(4, [](ProcessGroup world, int rank) {
    InnerZero zero(world, {.sync_every = 1});
    zero.iteration(own_rows(0, rank));
    for (auto& parameter : zero.net->first->parameters()) parameter.set_requires_grad(false);
    zero.iteration(own_rows(1, rank));
    const auto all = world.all_gather(flat(zero.net->parameters())).view({4, -1});
    for (int other = 1; other < 4; ++other) EXPECT_TRUE(at::equal(all[other], all[0])) << other;
  });
}

}  // namespace
}  // namespace tessera::testing::local
