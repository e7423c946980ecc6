#include <memory>
#include <set>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/module_state_dict.h"

// Option share_parameters of DistributedDataParallel: one copy of the frozen parameters a host.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

using SharingDdp = DistributedDataParallel<Uneven>;

Uneven half_frozen(uint64_t seed) {
  auto net = seeded<Uneven>(seed);
  net->first->weight.requires_grad_(false);
  net->second->weight.requires_grad_(false);
  return net;
}

TEST(DdpShareParameters, TrainBitByBitAsWholeCopies) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{0}, {0, 0}, {0, 0, 0}, {0, 0, 0, 0}, {0, 0, 1}, {0, 1}}) {
    const int world = static_cast<int>(hosts.size());
    std::vector<const void*> places(hosts.size());
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      auto net = half_frozen(8 + rank), other = half_frozen(8 + rank);
      SharingDdp ours(net, group, {.share_parameters = true}), theirs(other, group);
      places[rank] = net->second->weight.data_ptr();
      expect_same_weights(net, other);
      for (auto* ddp : {&ours, &theirs}) {
        std::vector<at::Tensor> trained;
        for (const auto& parameter : ddp->module()->parameters())
          if (parameter.requires_grad()) trained.push_back(parameter);
        const auto optimizer = adamw(trained);
        for (int step = 0; step < 4; ++step) {
          loss_of((*ddp)(rows(step, rank, world))).backward();
          optimizer->step();
          clear_gradients(trained);
        }
      }
      expect_same_weights(net, other);
      int64_t whole = 0, frozen = 0;
      for (const auto& parameter : net->parameters()) {
        whole += static_cast<int64_t>(parameter.nbytes());
        if (!parameter.requires_grad()) frozen += static_cast<int64_t>(parameter.nbytes());
      }
      EXPECT_EQ(theirs.parameter_bytes(), whole);
      auto parts = at::full({1}, ours.parameter_bytes(), at::kLong);
      group.all_reduce(parts);
      const std::set<int> all(hosts.begin(), hosts.end());
      EXPECT_EQ(parts.item<int64_t>(),
                world * (whole - frozen) + static_cast<int64_t>(all.size()) * frozen);
      for (int peer = 0; peer < world; ++peer)
        EXPECT_EQ(places[peer] == places[rank], hosts[peer] == hosts[rank]);
      group.barrier();
    });
  }
}

TEST(DdpShareParameters, RefuseWritesAndRunThemOnceAHost) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = half_frozen(8);
    auto ddp =
        std::make_unique<SharingDdp>(net, group, SharingDdp::Options{.share_parameters = true});
    const auto write = [&] {
      const at::NoGradGuard no_grad;
      net->second->weight.add_(1);
    };
    EXPECT_THAT(
        thrown_by(write),
        AllOf(HasSubstr(fmt::format("DistributedDataParallel: rank {}: ", rank)),
              HasSubstr("writes to parameter second.weight"), HasSubstr("ddp.with_shared_write")));
    {
      const at::NoGradGuard no_grad;
      net->scale.fill_(1);  // trainable ones are this rank's own
    }
    const auto before = net->second->weight.detach().clone();
    group.barrier();
    ddp->with_shared_write(write);
    EXPECT_TRUE(at::equal(net->second->weight, before + 1));
    const auto saved = state_dict(*seeded<Uneven>(9));
    group.barrier();
    ddp->with_shared_write([&] { load_state_dict(*net, saved); });
    expect_same_weights(net, seeded<Uneven>(9));
    group.barrier();
    ddp.reset();
    EXPECT_THAT(thrown_by(write), HasSubstr("after the object that shares it was destroyed"));
  });
}

// ddp_thaw_test.cpp compares what is trained then.
TEST(DdpShareParameters, AThawedParameterIsEachRanksOwn) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = half_frozen(8);
    SharingDdp ddp(net, group, {.share_parameters = true});
    const auto before = ddp.parameter_bytes();
    const auto values = net->second->weight.detach().clone();
    net->second->weight.requires_grad_(true);
    loss_of(ddp(rows(0, rank, 2))).backward();
    EXPECT_TRUE(at::equal(net->second->weight, values));
    EXPECT_EQ(ddp.parameter_bytes(), before + static_cast<int64_t>(values.nbytes()));
    const at::NoGradGuard no_grad;
    net->second->weight.fill_(rank);
    group.barrier();
    EXPECT_EQ(net->second->weight.sum().item<double>(), rank * values.numel());
    group.barrier();
  });
}

TEST(DdpShareParameters, RanksOfAHostWithoutSharedMemoryAreAnErrorOnEveryRank) {
  ProcessGroupOptions gloo;
  gloo.backend = Backend::Gloo;
  const auto errors = run_ranks_catching(2,
                                         [](ProcessGroup group, int) {
                                           auto net = half_frozen(8);
                                           SharingDdp ddp(net, group, {.share_parameters = true});
                                         },
                                         gloo, {0, 0});
  expect_usage_errors(errors, "option share_parameters needs memory that the 2 ranks");
}

}  // namespace
