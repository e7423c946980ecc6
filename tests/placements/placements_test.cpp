// Each wrapper trains to the same bits wherever its ranks are. The ranks are threads of one
// process, so their hosts are numbers.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "placements/wrappers.h"

namespace tessera::testing {
namespace {

using Hosts = std::vector<int>;

const std::vector<Hosts> kPlacements{{0, 1},       {0, 0, 1},    {0, 1, 0},
                                     {0, 1, 2},    {0, 1, 2, 3}, {0, 0, 1, 1},
                                     {0, 0, 0, 1}, {0, 1, 1, 1}, {0, 1, 0, 1}};
const std::vector<Hosts> kSomePlacements{{0, 1}, {0, 1, 0}, {0, 1, 2}, {0, 1, 1, 1}};

Tensors train(const Hosts& hosts, const NamedTrain& wrapper, const Training& training,
              Backend backend = Backend::Auto) {
  ProcessGroupOptions options;
  options.backend = backend;
  Tensors result;
  run_ranks(
      static_cast<int>(hosts.size()),
      [&](ProcessGroup group, int rank) {
        auto weights = wrapper.train(group, rank, training);
        if (rank == 0) result = std::move(weights);
      },
      options, hosts);
  return result;
}

void expect_same_bits(const Training& training, const std::vector<Hosts>& placements,
                      Backend backend = Backend::Auto) {
  std::map<std::pair<size_t, std::string>, Tensors> on_one_host;  // by world and wrapper
  for (const auto& hosts : placements) {
    const Hosts together(hosts.size(), 0);
    for (const auto& wrapper : all_trainings(static_cast<int>(hosts.size()))) {
      if (training.joins && wrapper.name == "distributed optimizer") continue;
      SCOPED_TRACE(wrapper.name + " on " + ::testing::PrintToString(hosts));
      auto& expected = on_one_host[{hosts.size(), wrapper.name}];
      if (expected.empty()) expected = train(together, wrapper, training);
      const auto found = train(hosts, wrapper, training, backend);
      ASSERT_FALSE(found.empty());
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i;
    }
  }
}

TEST(Placements, EachWrapperHasTheSameBits) { expect_same_bits({}, kPlacements); }

TEST(Placements, EachWrapperHasTheSameBitsInBfloat16) {
  expect_same_bits({.dtype = at::kBFloat16, .steps = 2}, kSomePlacements);
}

TEST(Placements, EachWrapperHasTheSameBitsInAJoin) {
  expect_same_bits({.steps = 2, .joins = true}, kSomePlacements);
}

TEST(Placements, EachWrapperHasTheSameBitsOverMpi) {
  expect_same_bits({.steps = 2}, {{0, 1}, {0, 1, 0}, {0, 0, 1, 1}}, Backend::MPI);
}

TEST(Placements, MessagesOnOneHostHaveTheBitsOfSharedMemory) {
  for (const int world : {2, 3, 4}) {
    const Hosts together(world, 0);
    for (const auto& wrapper : all_trainings(world)) {
      if (wrapper.shares) continue;
      SCOPED_TRACE(wrapper.name + " on " + std::to_string(world));
      const auto expected = train(together, wrapper, {});
      for (const auto backend : {Backend::TCP, Backend::Gloo}) {
        const auto found = train(together, wrapper, {}, backend);
        for (size_t i = 0; i < found.size(); ++i)
          EXPECT_TRUE(at::equal(found[i], expected[i])) << "parameter " << i;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
