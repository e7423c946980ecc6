#include <torch/optim/lbfgs.h>

#include "zero/zero_harness.h"

// Sharded against plain: the same model, on the concatenated batch in one process, over several
// steps.

namespace {

using namespace tessera;
using namespace tessera::testing;

struct Case {
  std::string optimizer;
  OptionMap options;
  ZeroOptions zero;
  std::string name;
};

std::vector<Case> cases() {
  std::vector<Case> result;
  const std::vector<std::pair<std::string, OptionMap>> optimizers{
      {"SGD", {{"lr", 0.05}, {"momentum", 0.9}, {"weight_decay", 0.01}}},
      {"Adam", {{"lr", 0.01}, {"amsgrad", true}}},
      {"AdamW", {{"lr", 0.01}, {"weight_decay", 0.1}}},
      {"Adagrad", {{"lr", 0.05}}},
      {"RMSprop", {{"lr", 0.01}, {"momentum", 0.5}, {"centered", true}}},
      {"torch.AdamW", {{"lr", 0.01}}},
  };
  for (const auto& [name, options] : optimizers) {
    for (const auto partition : {Partition::flat, Partition::whole, Partition::first_fit}) {
      for (const bool view : {true, false}) {
        for (const bool shard : {false, true}) {
          ZeroOptions zero;
          zero.partition = partition;
          zero.parameters_as_bucket_view = view;
          zero.shard_gradients = shard;
          zero.bucket_cap_mb = 40.0 / (1 << 20);  // 10 floats: several buckets
          auto label = name + "_" + partition_name(partition) + (view ? "_view" : "_own") +
                       (shard ? "_shard_gradients" : "");
          std::replace(label.begin(), label.end(), '.', '_');
          result.push_back({name, options, zero, label});
        }
      }
    }
  }
  return result;
}

class ZeroParity : public ::testing::TestWithParam<Case> {};

TEST_P(ZeroParity, EqualsThePlainOptimizerOnTheConcatenatedBatch) {
  const auto& test = GetParam();
  constexpr int kSteps = 5;
  auto plain = seeded<Uneven>(1);
  const auto reference = factory(
      test.optimizer, test.options)({torch::optim::OptimizerParamGroup(plain->parameters())});
  for (int step = 0; step < kSteps; ++step) {
    reference->zero_grad();
    loss_of(plain(rows(step))).backward();
    reference->step();
  }
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1 + rank);  // rank 0's weights are given to all
      Zero zero(*net, group, factory(test.optimizer, test.options), test.zero);
      for (int step = 0; step < kSteps; ++step) {
        loss_of(net(rows(step, rank, world))).backward();
        zero.step();
        zero.zero_grad();
      }
      const auto ours = net->named_parameters();
      for (const auto& item : plain->named_parameters()) {
        const auto& mine = ours[item.key()];
        ASSERT_TRUE(at::allclose(mine, item.value(), 1e-5, 1e-6))
            << item.key() << " on rank " << rank << " of " << world << "\n"
            << mine << item.value();
        if (world == 1)
          ASSERT_TRUE(at::equal(mine, item.value())) << item.key() << ": bitwise in a world of one";
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, ZeroParity, ::testing::ValuesIn(cases()),
                         [](const auto& tested) { return tested.param.name; });

/// Parameters after three steps on two ranks.
std::vector<at::Tensor> trained(int world, const ZeroOptions& options,
                                const std::string& name = "AdamW") {
  std::vector<at::Tensor> result;
  run_ranks(world, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(3);
    Zero zero(*net, group, factory(name), options);
    for (int step = 0; step < 3; ++step) {
      loss_of(net(rows(step, rank, world))).backward();
      zero.step();
      zero.zero_grad();
    }
    if (rank == 0) result = copies(net->parameters());
  });
  return result;
}

TEST(ZeroParity, EveryWayGivesTheSameBits) {
  for (int world = 2; world <= 4; ++world) {
    const auto expected = trained(world, {});
    for (const auto& test : cases()) {
      if (test.optimizer != "AdamW") continue;
      const auto ours = trained(world, test.zero);
      for (size_t i = 0; i < expected.size(); ++i)
        ASSERT_TRUE(at::equal(ours[i], expected[i])) << test.name << ", world " << world;
    }
  }
}

TEST(ZeroParity, LargeParametersAreUpdatedInManyRuns) {
  const auto make = [] {
    return std::vector<at::Tensor>{at::linspace(-1, 1, 50001).requires_grad_(),
                                   at::linspace(1, 3, 30011).requires_grad_()};
  };
  const auto loss = [](const std::vector<at::Tensor>& p) {
    return (p[0].square() * p[0]).sum() + (p[1].square() * 0.25).sum();
  };
  const auto plain = make();
  const auto reference = factory("AdamW")({torch::optim::OptimizerParamGroup(plain)});
  for (int step = 0; step < 3; ++step) {
    reference->zero_grad();
    loss(plain).backward();
    reference->step();
  }
  for (const auto backend : {Backend::Auto, Backend::TCP}) {
    for (const bool shard : {false, true}) {
      for (int world = 1; world <= 3; ++world) {
        ProcessGroupOptions options;
        options.backend = backend;
        run_ranks(
            world,
            [&](ProcessGroup group, int rank) {
              const auto mine = make();
              Zero zero({{{{"first", mine[0]}, {"second", mine[1]}}, {}}}, group, factory("AdamW"),
                        {.shard_gradients = shard});
              for (int step = 0; step < 3; ++step) {
                loss(mine).backward();
                zero.step();
                zero.zero_grad();
              }
              for (size_t i = 0; i < mine.size(); ++i)
                ASSERT_TRUE(at::allclose(mine[i], plain[i], 1e-5, 1e-6)) << i << " world " << world;
            },
            options);
      }
    }
  }
}

TEST(ZeroParity, TwoDtypesAndChannelsLast) {
  auto plain = seeded<Mixed>(5);
  const auto reference = factory("AdamW")({torch::optim::OptimizerParamGroup(plain->parameters())});
  for (int step = 0; step < 3; ++step) {
    reference->zero_grad();
    loss_of(plain(images(step))).backward();
    reference->step();
  }
  for (const auto partition : {Partition::flat, Partition::whole}) {
    for (const bool view : {true, false}) {
      for (int world = 1; world <= 4; ++world) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Mixed>(5);
          const auto identity = net->conv->weight;
          Zero zero(*net, group, factory("AdamW"),
                    {.partition = partition, .parameters_as_bucket_view = view});
          EXPECT_EQ(identity.strides(), plain->conv->weight.strides()) << "strides are kept";
          EXPECT_TRUE(net->conv->weight.is_same(identity)) << "identity is kept";
          for (int step = 0; step < 3; ++step) {
            loss_of(net(images(step, rank, world))).backward();
            zero.step();
            zero.zero_grad();
          }
          for (const auto& item : plain->named_parameters())
            ASSERT_TRUE(at::allclose(net->named_parameters()[item.key()], item.value(), 1e-5, 1e-6))
                << item.key() << " world " << world;
        });
      }
    }
  }
}

TEST(ZeroParity, LbfgsEqualsPlainInAWorldOfOneAndAgreesInLargerOnes) {
  const torch::optim::LBFGSOptions options =
      torch::optim::LBFGSOptions(0.5).max_iter(5).line_search_fn("strong_wolfe");
  auto plain = seeded<Uneven>(7);
  torch::optim::LBFGS reference(plain->parameters(), options);
  const auto train = [](auto& net, auto& optimizer, int rank, int world) {
    float last = 0;
    for (int step = 0; step < 3; ++step)
      last = optimizer
                 .step([&] {
                   optimizer.zero_grad();
                   auto loss = loss_of(net(rows(0, rank, world)));
                   loss.backward();
                   return loss;
                 })
                 .template item<float>();
    return last;
  };
  const float expected = train(plain, reference, 0, 1);
  for (int world = 1; world <= 3; ++world) {
    std::vector<std::vector<at::Tensor>> results(world);
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(7);
      const float first = loss_of(net(rows(0))).item<float>();
      Zero zero(*net, group, optimizer_factory<torch::optim::LBFGS>(options),
                {.partition = Partition::whole});
      const float last = train(net, zero, rank, world);
      EXPECT_LT(last, first);
      if (world == 1) EXPECT_FLOAT_EQ(last, expected);
      results[rank] = copies(net->parameters());
    });
    for (int rank = 1; rank < world; ++rank)
      for (size_t i = 0; i < results[0].size(); ++i)
        EXPECT_TRUE(at::equal(results[rank][i], results[0][i]));
  }
}

/// A user's own: sign descent with a step count in its own state.
struct SignOptions : torch::optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double lr = 0.1) : rate(lr) {}
  double get_lr() const override { return rate; }
  void set_lr(double lr) override { rate = lr; }
  double rate;
};

class SignDescent : public torch::optim::Optimizer {
 public:
  SignDescent(std::vector<torch::optim::OptimizerParamGroup> groups, SignOptions defaults)
      : Optimizer(std::move(groups), std::make_unique<SignOptions>(defaults)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    at::NoGradGuard no_grad;
    for (auto& group : param_groups_) {
      for (auto& p : group.params())
        if (p.grad().defined()) p.sub_(p.grad().sign(), group.options().get_lr());
    }
    return {};
  }
};

TEST(ZeroParity, AUsersOwnOptimizer) {
  auto plain = seeded<Uneven>(9);
  SignDescent reference({torch::optim::OptimizerParamGroup(plain->parameters())},
                        SignOptions(0.05));
  for (int step = 0; step < 3; ++step) {
    reference.zero_grad();
    loss_of(plain(rows(step))).backward();
    reference.step();
  }
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(9);
      EXPECT_THROW(Zero(*net, group, optimizer_factory<SignDescent>(SignOptions(0.05)),
                        {.partition = Partition::flat}),
                   UsageError);
      Zero zero(*net, group, optimizer_factory<SignDescent>(SignOptions(0.05)),
                {.partition = Partition::whole});
      for (int step = 0; step < 3; ++step) {
        loss_of(net(rows(step, rank, world))).backward();
        zero.step();
        zero.zero_grad();
      }
      for (const auto& item : plain->named_parameters())
        ASSERT_TRUE(at::allclose(net->named_parameters()[item.key()], item.value(), 1e-5, 1e-6))
            << item.key();
    });
  }
}

}  // namespace
