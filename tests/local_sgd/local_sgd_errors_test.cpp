#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "local_sgd/simulation.h"

namespace tessera::testing::local {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refused(LocalSgdOptions options) {
  auto net = seeded<Uneven>(1);
  return thrown_by([&] { LocalSgd(ProcessGroup(), shards_of(*net), options); });
}

TEST(LocalSgd, OptionsOutOfRangeAreNamed) {
  EXPECT_THAT(refused({.sync_every = 0}), HasSubstr("sync_every: 0; expected a whole number >= 1"));
  EXPECT_THAT(refused({.lr = NAN}), HasSubstr("lr: nan; expected a number > 0"));
  EXPECT_THAT(refused({.lr = INFINITY}), HasSubstr("lr: inf"));
  EXPECT_THAT(refused({.lr = 0}), HasSubstr("lr: 0;"));
  EXPECT_THAT(refused({.momentum = 1}), HasSubstr("momentum: 1;"));
  EXPECT_THAT(refused({.momentum = NAN}), HasSubstr("momentum: nan"));
}

TEST(LocalSgd, AnOptionOutOfRangeOnOneRankIsAnErrorOnAll) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    LocalSgd(group, shards_of(*net), {.sync_every = rank == 1 ? -2 : 3});
  });
  expect_usage_errors(errors, "LocalSgd: rank 1: sync_every: -2");
}

TEST(LocalSgd, RanksThatDifferInOptionsOrShardsAreNamed) {
  expect_usage_errors(run_ranks_catching(2,
                                         [](ProcessGroup group, int rank) {
                                           auto net = seeded<Uneven>(1);
                                           LocalSgd(group, shards_of(*net),
                                                    {.sync_every = rank + 3});
                                         }),
                      "sync_every = 4");
  expect_usage_errors(run_ranks_catching(2,
                                         [](ProcessGroup group, int rank) {
                                           auto net = seeded<Uneven>(1);
                                           auto shards = shards_of(*net);
                                           if (rank == 1) std::swap(shards[0], shards[1]);
                                           LocalSgd(group, shards);
                                         }),
                      "first.weight");
}

TEST(LocalSgd, ShardsThatCannotBeSynchronisedAreNamed) {
  const auto with = [](const at::Tensor& tensor) {
    return thrown_by([&] { LocalSgd(ProcessGroup(), {{{"odd", {2}, 0, 2}, tensor}}); });
  };
  EXPECT_THAT(with({}), HasSubstr("shard 0 (odd) is undefined"));
  EXPECT_THAT(with(at::zeros({2}, at::kLong)), HasSubstr("shard 0 (odd) has dtype Long"));
  EXPECT_THAT(with(at::zeros({2}).to_sparse()), HasSubstr("shard 0 (odd) is sparse"));
}

TEST(LocalSgd, AParameterWithNewMemoryIsAnErrorOnAllRanksAndEndsTheObject) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    LocalSgd local(group, shards_of(*net), {.sync_every = 2});
    local.step();
    if (rank == 1) net->second->weight.set_data(net->second->weight.detach().clone());
    const auto first = thrown_by([&] { local.step(); });
    EXPECT_THAT(first, AllOf(HasSubstr("LocalSgd: rank 1: parameter second.weight"),
                             HasSubstr("other memory")));
    EXPECT_THAT(thrown_by([&] { local.step(); }),
                AllOf(HasSubstr("step() after a failure"), HasSubstr("second.weight")));
    EXPECT_THAT(thrown_by([&] { local.state_dict(); }), HasSubstr("state_dict() after a failure"));
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
}

TEST(LocalSgdGroups, ConsecutiveRanksOrTheRanksOfAHost) {
  run_ranks(6, [](ProcessGroup world, int rank) {
    const auto groups = local_sgd_groups(world, 3);
    EXPECT_EQ(groups.inner.world_ranks(),
              (rank < 3 ? std::vector<int>{0, 1, 2} : std::vector<int>{3, 4, 5}));
    EXPECT_EQ(groups.outer.world_ranks(), (std::vector<int>{rank % 3, rank % 3 + 3}));
  });
  run_ranks_on({0, 1, 0, 1}, [](ProcessGroup world, int rank) {
    const auto groups = local_sgd_groups(world);
    EXPECT_EQ(groups.inner.world_ranks(),
              (rank % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3}));
    EXPECT_EQ(groups.outer.world_ranks(),
              (rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3}));
    world.barrier();  // a rank that ends sooner would close connections that others still open
  });
}

TEST(LocalSgdGroups, ADivisionThatIsNotEvenIsRefused) {
  const auto split = [](int64_t group_size) {
    return [group_size](ProcessGroup world, int) { local_sgd_groups(world, group_size); };
  };
  expect_usage_errors(run_ranks_catching(3, split(2)), "group_size is 2 with 3 ranks");
  expect_usage_errors(run_ranks_catching(2, split(-1)), "group_size is -1");
  expect_usage_errors(run_ranks_catching(2, split(0)), "all ranks are on one host");
  expect_usage_errors(run_ranks_catching(3, split(0), {}, {0, 0, 1}),
                      "host 0 has 2 ranks and host 1 has 1");
}

}  // namespace
}  // namespace tessera::testing::local
