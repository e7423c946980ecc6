#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "local_sgd/simulation.h"
#include "tessera/optim/optimizer_state_dict.h"

namespace tessera::testing::local {
namespace {

using ::testing::HasSubstr;

TEST(LocalSgd, ResumesBitByBitAtEveryStep) {
  constexpr int kResumeSteps = 9;
  for (const auto& tested : cases(3)) {
    for (const int saved_after : {2, 3, 4, 6}) {
      run_ranks(2, [&](ProcessGroup group, int rank) {
        const auto run = [&](Uneven& net, torch::optim::Optimizer& optimizer, LocalSgd& local,
                             int begin, int end) {
          for (int step = begin; step < end; ++step) {
            train_on(net, optimizer, own_rows(step, rank));
            local.step();
          }
        };
        auto net = seeded<Uneven>(1);
        auto optimizer = inner_optimizer(net);
        LocalSgd local(group, shards_of(*net), tested.options);
        run(net, *optimizer, local, 0, saved_after);
        const auto weights = flat(net->parameters());
        const auto inner = state_dict(*optimizer, named_parameters(*net));
        std::map<std::string, at::Tensor> copied;
        for (const auto& [name, tensor] : local.state_dict()) copied[name] = tensor.clone();
        const OptimizerStateDict kept = inner;

        auto again = seeded<Uneven>(2);
        auto second = inner_optimizer(again);
        LocalSgd resumed(group, shards_of(*again), tested.options);
        set_flat(again, weights);
        load_state_dict(*second, named_parameters(*again), kept);
        resumed.load_state_dict(copied);
        run(again, *second, resumed, saved_after, kResumeSteps);
        run(net, *optimizer, local, saved_after, kResumeSteps);
        EXPECT_TRUE(at::equal(flat(net->parameters()), flat(again->parameters())))
            << tested.name << ", saved after " << saved_after;
        EXPECT_EQ(resumed.steps(), local.steps());
        EXPECT_EQ(resumed.synchronizations(), local.synchronizations());
        resumed.synchronize();
        local.synchronize();
        EXPECT_TRUE(at::equal(flat(net->parameters()), flat(again->parameters()))) << tested.name;
      });
    }
  }
}

TEST(LocalSgd, AStateThatDoesNotFitIsRefusedAndChangesNothing) {
  auto net = seeded<Uneven>(1);
  LocalSgd local(ProcessGroup(), shards_of(*net), {.sync_every = 2});
  local.step();
  const auto good = local.state_dict();
  const auto refused = [&](LocalSgd::State state) {
    return thrown_by([&] { local.load_state_dict(state); });
  };
  auto state = good;
  state.erase("momentum");
  EXPECT_THAT(refused(state), HasSubstr("rank 0: there is no entry momentum"));
  state = good;
  state["residual"] = at::zeros({3});
  EXPECT_THAT(refused(state), HasSubstr("unknown entry residual"));
  state = good;
  state["anchor"] = at::zeros({3});
  EXPECT_THAT(refused(state), HasSubstr("entry anchor has 3 elements; expected"));
  state = good;
  state["pending"] = good.at("anchor");
  EXPECT_THAT(refused(state), HasSubstr("there is no entry start"));
  const auto after = local.state_dict();
  for (const auto& [name, tensor] : good) EXPECT_TRUE(at::equal(tensor, after.at(name))) << name;
}

}  // namespace
}  // namespace tessera::testing::local
