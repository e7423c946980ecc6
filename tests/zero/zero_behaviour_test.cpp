#include <memory>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/step_lr.h>

#include "tessera/detail/trainer_access.h"
#include "zero/zero_harness.h"

// Rules of step(), groups, accumulation, clipping, traffic, and bad input.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<ZeroOptions> ways() {
  std::vector<ZeroOptions> result;
  for (const auto partition : {Partition::flat, Partition::whole}) {
    for (const bool shard : {false, true}) {
      ZeroOptions options;
      options.partition = partition;
      options.shard_gradients = shard;
      options.bucket_cap_mb = 40.0 / (1 << 20);
      result.push_back(options);
    }
  }
  return result;
}

TEST(ZeroBehaviour, SchedulersThatHoldTheWrapperWork) {
  for (const auto& options : ways()) {
    auto plain = seeded<Uneven>(1);
    const auto reference =
        factory("AdamW")({torch::optim::OptimizerParamGroup(plain->parameters())});
    torch::optim::StepLR plain_schedule(*reference, 2, 0.1);
    for (int step = 0; step < 5; ++step) {
      reference->zero_grad();
      loss_of(plain(rows(step))).backward();
      reference->step();
      plain_schedule.step();
    }
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      Zero zero(*net, group, factory("AdamW"), options);
      torch::optim::StepLR schedule(zero, 2, 0.1);
      for (int step = 0; step < 5; ++step) {
        loss_of(net(rows(step, rank, 2))).backward();
        zero.step();
        zero.zero_grad();
        schedule.step();
      }
      EXPECT_NEAR(zero.param_groups()[0].options().get_lr(), 0.05 * 0.01, 1e-9);
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6));
    });
  }
}

TEST(ZeroBehaviour, ClosureIsCalledOnceAndItsLossReturned) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    Zero zero(*net, group, factory("SGD"));
    int calls = 0;
    const auto loss = zero.step([&] {
      ++calls;
      zero.zero_grad();
      auto value = loss_of(net(rows(0, rank, 2)));
      value.backward();
      return value;
    });
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(loss.defined());
  });
}

TEST(ZeroBehaviour, GroupsWithTheirOwnOptionsAndOneAddedLater) {
  for (const auto& options : ways()) {
    auto plain = seeded<Uneven>(2);
    auto groups = std::vector<torch::optim::OptimizerParamGroup>{
        torch::optim::OptimizerParamGroup(plain->second->parameters())};
    groups[0].set_options(default_optimizers().options_for("AdamW", {{"lr", 0.2}}));
    const auto reference = factory("AdamW")(groups);
    for (int step = 0; step < 5; ++step) {
      if (step == 3)
        tessera::add_param_group(*reference,
                                 torch::optim::OptimizerParamGroup(
                                     plain->last->parameters(),
                                     default_optimizers().options_for("AdamW", {{"lr", 0.01}})));
      for (auto& p : plain->parameters()) p.mutable_grad() = at::Tensor();
      loss_of(plain(rows(step))).backward();
      reference->step();
    }
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(2);
      std::vector<Zero::Group> first;
      first.push_back({{{"second.weight", net->second->weight}, {"second.bias", net->second->bias}},
                       {{"lr", 0.2}}});
      Zero zero(first, group, factory("AdamW"), options);
      for (int step = 0; step < 5; ++step) {
        if (step == 3)
          zero.add_param_group(
              {{{"last.weight", net->last->weight}, {"last.bias", net->last->bias}},
               {{"lr", 0.01}}});
        loss_of(net(rows(step, rank, 2))).backward();
        zero.step();
        for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
      }
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::allclose(net->named_parameters()[item.key()], item.value(), 1e-5, 1e-6))
            << item.key();
    });
  }
}

TEST(ZeroBehaviour, FrozenThenUnfrozenKeepsStateAndRepartitions) {
  for (const auto& options : ways()) {
    auto plain = seeded<Uneven>(2);
    const auto reference =
        factory("AdamW")({torch::optim::OptimizerParamGroup(plain->parameters())});
    const auto toggle = [](Uneven& net, int step) {
      if (step == 2) net->second->weight.requires_grad_(false);
      if (step == 4) net->second->weight.requires_grad_(true);
    };
    for (int step = 0; step < 6; ++step) {
      toggle(plain, step);
      for (auto& p : plain->parameters()) p.mutable_grad() = at::Tensor();
      loss_of(plain(rows(step))).backward();
      reference->step();
    }
    run_ranks(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(2);
      Zero zero(*net, group, factory("AdamW"), options);
      for (int step = 0; step < 6; ++step) {
        toggle(net, step);
        loss_of(net(rows(step, rank, 3))).backward();
        zero.step();
        zero.zero_grad();
      }
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::allclose(net->named_parameters()[item.key()], item.value(), 1e-5, 1e-6))
            << item.key();
    });
  }
}

TEST(ZeroBehaviour, ALargeFrozenParameterLeavesNoRankIdle) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    NamedParameters parameters{{"large", at::zeros({100}).requires_grad_(false)}};
    for (int i = 0; i < 4; ++i)
      parameters.emplace_back("small" + std::to_string(i), at::zeros({10}).requires_grad_(true));
    Zero zero({{parameters, {}}}, group, factory("SGD"), {.partition = Partition::whole});
    int64_t mine = 0;
    for (const auto& shard : zero.shards()) mine += shard.numel;
    EXPECT_EQ(mine, 20);
  });
}

TEST(ZeroBehaviour, UnusedParametersAreSkippedAsByAPlainOptimizer) {
  for (const auto& options : ways()) {
    auto plain = seeded<Uneven>(4);
    const auto reference = factory("AdamW", {{"lr", 0.01}, {"weight_decay", 0.5}})(
        {torch::optim::OptimizerParamGroup(plain->parameters())});
    const auto loss = [](Uneven& net, const at::Tensor& x, bool all) {
      return loss_of(all ? net(x) : torch::tanh(net->second(x)));
    };
    for (int step = 0; step < 4; ++step) {
      for (auto& p : plain->parameters()) p.mutable_grad() = at::Tensor();
      loss(plain, rows(step), step % 2 == 0).backward();
      reference->step();
    }
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(4);
      Zero zero(*net, group, factory("AdamW", {{"lr", 0.01}, {"weight_decay", 0.5}}), options);
      for (int step = 0; step < 4; ++step) {
        loss(net, rows(step, rank, 2), step % 2 == 0).backward();
        zero.step();
        zero.zero_grad();
      }
      for (const auto& item : plain->named_parameters())
        EXPECT_TRUE(at::allclose(net->named_parameters()[item.key()], item.value(), 1e-5, 1e-6))
            << item.key();
    });
  }
}

TEST(ZeroBehaviour, UsedOnOneRankOnlyCountsAsZeroOnTheOther) {
  for (const auto& options : ways()) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(4), alone = seeded<Uneven>(4);
      Zero zero(*net, group, factory("SGD", {{"lr", 1.0}}), options);
      for (int step = 0; step < 3; ++step) {
        const bool all =
            rank == 0 || step == 1;  // at step 2 rank 1 has a gradient of its own from before
        {
          torch::NoGradGuard no_grad;
          for (size_t i = 0; i < net->parameters().size(); ++i)
            alone->parameters()[i].copy_(net->parameters()[i]);
        }
        const auto before = net->last->weight.detach().clone();
        (all ? loss_of(net(rows(0))) : loss_of(torch::tanh(net->second(rows(0))))).backward();
        zero.step();
        zero.zero_grad();
        for (auto& p : alone->parameters()) p.mutable_grad() = at::Tensor();
        loss_of(alone(rows(0))).backward();
        EXPECT_TRUE(at::allclose(net->last->weight,
                                 before - alone->last->weight.grad() / (step == 1 ? 1 : 2), 1e-5,
                                 1e-7))
            << "step " << step;
      }
    });
  }
}

TEST(ZeroBehaviour, AccumulationEqualsOneLargeBatch) {
  for (const auto& options : ways()) {
    auto plain = seeded<Uneven>(6);
    const auto reference =
        factory("AdamW")({torch::optim::OptimizerParamGroup(plain->parameters())});
    for (int step = 0; step < 3; ++step) {
      reference->zero_grad();
      (loss_of(plain(rows(2 * step))) + loss_of(plain(rows(2 * step + 1)))).backward();
      reference->step();
    }
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(6);
      Zero zero(*net, group, factory("AdamW"), options);
      for (int step = 0; step < 3; ++step) {
        {
          const auto before = group.stats().calls();
          auto scope = zero.no_sync();
          loss_of(net(rows(2 * step, rank, 2))).backward();
          EXPECT_EQ(group.stats().calls(), before) << "nothing is sent";
        }
        loss_of(net(rows(2 * step + 1, rank, 2))).backward();
        zero.step();
        zero.zero_grad();
      }
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6));
    });
  }
}

TEST(ZeroBehaviour, ClippingEqualsThePlainOne) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (const auto partition : {Partition::flat, Partition::whole}) {
      auto plain = seeded<Uneven>(8);
      const auto reference =
          factory("SGD")({torch::optim::OptimizerParamGroup(plain->parameters())});
      double expected = 0;
      for (int step = 0; step < 3; ++step) {
        reference->zero_grad();
        loss_of(plain(rows(step))).backward();
        expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1, p);
        reference->step();
      }
      for (int world = 1; world <= 4; ++world) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Uneven>(8);
          Zero zero(*net, group, factory("SGD"), {.partition = partition});
          double norm = 0;
          for (int step = 0; step < 3; ++step) {
            loss_of(net(rows(step, rank, world))).backward();
            norm = zero.clip_grad_norm_(0.1, p);
            zero.step();
            zero.zero_grad();
          }
          EXPECT_NEAR(norm, expected, 1e-5 * expected);
          for (size_t i = 0; i < net->parameters().size(); ++i)
            EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6));
        });
      }
    }
  }
}

TEST(ZeroBehaviour, TheTrackedNormIsTheNorm) {
  for (const auto& options : ways()) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8), whole = seeded<Uneven>(8);
      Zero zero(*net, group, factory("SGD"), options);
      tessera::zero::TrainerAccess::track_norm(zero, true);
      loss_of(net(rows(0, rank, 2))).backward();
      zero.step();
      loss_of(whole(rows(0))).backward();
      const double expected = torch::nn::utils::clip_grad_norm_(whole->parameters(), 1e9);
      EXPECT_NEAR(tessera::zero::TrainerAccess::last_norm(zero), expected, 1e-6 * expected);
    });
  }
}

TEST(ZeroBehaviour, TrafficIsTwoUnitsNotThree) {
  for (const auto& options : ways()) {
    for (int world = 2; world <= 4; ++world) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        Zero zero(*net, group, factory("AdamW"), options);
        uint64_t numel = 0;
        for (const auto& p : net->parameters()) numel += p.numel();
        loss_of(net(rows(0, rank, world))).backward();
        zero.step();
        zero.zero_grad();
        group.barrier();
        group.reset_stats();
        loss_of(net(rows(1, rank, world))).backward();
        zero.step();
        const auto sums = group.all_gather(
            at::tensor({static_cast<int64_t>(group.stats().reduce_scatter.bytes_sent +
                                             group.stats().all_gather.bytes_sent),
                        static_cast<int64_t>(group.stats().reduce_scatter.bytes_received +
                                             group.stats().all_gather.bytes_received)}));
        EXPECT_EQ(sums.view({world, 2}).sum(0)[0].item<int64_t>(), 2 * (world - 1) * numel * 4)
            << "over ranks: 2 (W-1)/W P each";
        EXPECT_EQ(sums.view({world, 2}).sum(0)[1].item<int64_t>(), 2 * (world - 1) * numel * 4);
        EXPECT_EQ(group.stats().broadcast.calls, 0u);
        EXPECT_LE(group.stats().all_reduce.bytes_sent, 4096u) << "flags and norms only";
      });
    }
  }
}

TEST(ZeroBehaviour, SubGroupsTrainApart) {
  run_ranks(4, [&](ProcessGroup world, int rank) {
    auto half = *world.split(rank / 2);
    auto net = seeded<Uneven>(rank / 2);
    Zero zero(*net, half, factory("AdamW"));
    for (int step = 0; step < 2; ++step) {
      loss_of(net(rows(step, half.rank(), 2))).backward();
      zero.step();
      zero.zero_grad();
    }
    auto plain = seeded<Uneven>(rank / 2 * 2 == rank ? rank / 2 : rank / 2);
    const auto reference =
        factory("AdamW")({torch::optim::OptimizerParamGroup(plain->parameters())});
    for (int step = 0; step < 2; ++step) {
      reference->zero_grad();
      loss_of(plain(rows(step))).backward();
      reference->step();
    }
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6));
  });
}

TEST(ZeroBehaviour, ReducedByTheCallerGivesTheSame) {
  expect_callers_reduction_is_as_good<Uneven>(rows, [](Zero&) {});
}

TEST(ZeroBehaviour, BadParametersAreNamedByGroupAndIndex) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    const auto a = at::zeros({3}).requires_grad_(true), b = at::zeros({2}).requires_grad_(true);
    const auto refused = [&](NamedParameters parameters) {
      return thrown_by([&] { Zero({{parameters, {}}}, group, factory("SGD")); });
    };
    EXPECT_THAT(refused({}), HasSubstr("group 0 has no parameters"));
    EXPECT_THAT(refused({{"a", a}, {"b", at::Tensor()}}),
                HasSubstr("group 0, parameter 1 (b): the tensor is undefined"));
    EXPECT_THAT(refused({{"a", a}, {"b", b}, {"again", a}}),
                HasSubstr("group 0, parameter 2 (again): the same tensor as parameter 0 (a)"));
    EXPECT_THAT(refused({{"sparse", at::zeros({3}).to_sparse()}}),
                HasSubstr("group 0, parameter 0 (sparse): the tensor is sparse"));
    EXPECT_THAT(thrown_by([&] { Zero(std::vector<Zero::Group>{}, group, factory("SGD")); }),
                HasSubstr("no parameter groups"));
    EXPECT_THAT(thrown_by([&] {
                  Zero({{{{"a", a}}, {{"learning_rte", 0.1}}}}, group, factory("SGD"));
                }),
                HasSubstr("learning_rte"));
    EXPECT_THAT(thrown_by([&] {
                  Zero({{{{"a", a}}, {}}}, group, factory("SGD"), {.bucket_cap_mb = 0});
                }),
                HasSubstr("bucket_cap_mb is 0"));
    EXPECT_THAT(thrown_by([&] {
                  Zero({{{{"a", a}}, {}}}, group,
                       optimizer_factory<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1.0)),
                       {.partition = Partition::flat});
                }),
                HasSubstr("partition flat needs an element-wise optimizer"));
  });
}

TEST(ZeroBehaviour, RanksThatDifferAllHearTheFirstDifference) {
  const auto differ = [](const std::function<NamedParameters(int rank)>& make,
                         const std::string& words) {
    const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
      Zero({{make(rank), {}}}, group, factory("SGD"));
    });
    for (const auto& error : errors) EXPECT_THAT(message_of(error), HasSubstr(words));
  };
  const auto tensor = [](int64_t n, at::ScalarType dtype = at::kFloat) {
    return at::zeros({n}, dtype).requires_grad_(true);
  };
  differ(
      [&](int rank) {
        return rank == 1 ? NamedParameters{{"a", tensor(2)}, {"extra", tensor(1)}}
                         : NamedParameters{{"a", tensor(2)}};
      },
      "extra");
  differ(
      [&](int rank) {
        return rank == 1 ? NamedParameters{{"b", tensor(2)}, {"a", tensor(2)}}
                         : NamedParameters{{"a", tensor(2)}, {"b", tensor(2)}};
      },
      "entry 0");
  differ([&](int rank) { return NamedParameters{{"a", tensor(rank == 1 ? 3 : 2)}}; }, "[3]");
  differ(
      [&](int rank) {
        return NamedParameters{{"a", tensor(2, rank == 1 ? at::kDouble : at::kFloat)}};
      },
      "Double");
}

TEST(ZeroBehaviour, MisuseIsAnErrorNotASilentLoss) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("SGD"));
    loss_of(net(rows(0, rank, 2))).backward();
    zero.clip_grad_norm_(1.0);
    loss_of(net(rows(1, rank, 2))).backward();
    EXPECT_THAT(thrown_by([&] { zero.step(); }), HasSubstr("a backward came between"));
    zero.zero_grad();
    if (rank == 1) net->last->bias.set_data(net->last->bias.detach().clone());
    loss_of(net(rows(0, rank, 2))).backward();
    EXPECT_THAT(thrown_by([&] { zero.step(); }),
                HasSubstr("rank 1: parameter last.bias has other storage"))
        << "on both ranks";
  });
}

TEST(ZeroBehaviour, ABackwardThroughValuesFromBeforeTheStepIsRefusedAsByAPlainOptimizer) {
  for (const auto& options : ways()) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("SGD"), options);
      auto early = loss_of(net(rows(0, rank, 2)));
      loss_of(net(rows(0, rank, 2))).backward();
      zero.step();
      EXPECT_THROW(early.backward(), c10::Error);
    });
  }
}

}  // namespace
