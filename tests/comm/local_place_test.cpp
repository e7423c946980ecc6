#include "comm/rendezvous/local_place.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/group/process_group_impl.h"
#include "harness/ranks.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

namespace {

using tessera::ProcessGroup;
using tessera::UsageError;
using tessera::comm::LocalPlace;
using tessera::comm::World;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using Variables = std::map<std::string, std::string>;

World world_on(const std::vector<int>& hosts, int rank) {
  auto world = World::start(rank, static_cast<int>(hosts.size()), {});
  world.hosts = hosts;
  world.same_host = tessera::comm::all_equal(hosts);
  return world;
}

std::pair<int, int> place_of(const World& world, const Variables& variables = {}) {
  const LocalPlace place = tessera::comm::local_place(world, [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
  return {place.rank, place.size};
}

/// (local rank, local size) of every rank of a world with these hosts.
std::vector<std::pair<int, int>> places_on(const std::vector<int>& hosts) {
  std::vector<std::pair<int, int>> places;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank)
    places.push_back(place_of(world_on(hosts, rank)));
  return places;
}

TEST(LocalPlace, CountsTheRanksOfEachHost) {
  EXPECT_THAT(places_on({0, 0, 1, 1}), ElementsAre(Pair(0, 2), Pair(1, 2), Pair(0, 2), Pair(1, 2)));
}

TEST(LocalPlace, RanksOfAHostNeedNotBeConsecutive) {
  EXPECT_THAT(places_on({0, 1, 0, 1}), ElementsAre(Pair(0, 2), Pair(0, 2), Pair(1, 2), Pair(1, 2)));
}

TEST(LocalPlace, HostsMayHaveUnequalNumbersOfRanks) {
  EXPECT_THAT(places_on({0, 1, 1}), ElementsAre(Pair(0, 1), Pair(0, 2), Pair(1, 2)));
}

TEST(LocalPlace, OnOneHostItIsRankAndSize) {
  EXPECT_THAT(places_on({0, 0, 0}), ElementsAre(Pair(0, 3), Pair(1, 3), Pair(2, 3)));
  EXPECT_EQ(place_of(World::start(2, 3, {})), std::pair(2, 3)) << "without a list of hosts";
}

TEST(LocalPlace, AWorldOfOneIsRankZeroOfOne) {
  EXPECT_EQ(ProcessGroup().local_rank(), 0);
  EXPECT_EQ(ProcessGroup().local_size(), 1);
}

TEST(LocalPlace, UnknownHostsAreTakenFromTheLaunchersVariables) {
  auto world = World::start(3, 4, {});
  world.same_host = false;
  EXPECT_EQ(
      place_of(
          world,
          {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}}),
      std::pair(1, 2));
  EXPECT_EQ(place_of(world, {{"OMPI_COMM_WORLD_RANK", "3"},
                             {"OMPI_COMM_WORLD_SIZE", "4"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}),
            std::pair(0, 1));
}

TEST(LocalPlace, UnknownHostsAndVariablesOfAnotherGroupAreAnError) {
  auto world = World::start(1, 2, {});
  world.same_host = false;
  const auto error_of = [&](const Variables& variables) -> std::string {
    try {
      place_of(world, variables);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_THAT(error_of({}), HasSubstr("rank 1 of 2: the hosts of the ranks are unknown"));
  const Variables larger = {
      {"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_THAT(error_of(larger), HasSubstr("hosts of the ranks are unknown"));
  const Variables incomplete = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}};
  EXPECT_THAT(error_of(incomplete), HasSubstr("hosts of the ranks are unknown"));
}

TEST(LocalPlace, ASubGroupCountsItsOwnMembers) {
  tessera::testing::run_ranks_on({0, 1, 0, 1}, [](ProcessGroup group, int rank) {
    EXPECT_EQ(group.local_rank(), rank / 2);
    EXPECT_EQ(group.local_size(), 2);
    const auto host = *group.split(rank % 2);
    EXPECT_EQ(host.local_rank(), rank / 2);
    EXPECT_EQ(host.local_size(), 2);
    const auto across = *group.split(rank / 2);
    EXPECT_EQ(across.local_rank(), 0);
    EXPECT_EQ(across.local_size(), 1);
    const auto all_but_the_first = group.split(rank == 0 ? -1 : 0);
    if (rank == 0) return;
    EXPECT_EQ(all_but_the_first->local_rank(), rank == 3 ? 1 : 0);
    EXPECT_EQ(all_but_the_first->local_size(), rank == 2 ? 1 : 2);
  });
}

}  // namespace
