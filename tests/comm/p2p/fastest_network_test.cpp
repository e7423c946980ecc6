// The choice between networks that were measured, and MPI. tests/integration/networks_test.py
// measures some networks.
#include "comm/p2p/fastest_network.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/base/world.h"
#include "harness/thread_communicator.h"

namespace tessera::comm {
namespace {

Network network(double gigabits, int64_t speed = 0) {
  return {"", gigabits * 1.25e8, speed, "", {}};
}

TEST(FastestNetwork, MustBeFasterThanTheRouteToRank0) {
  EXPECT_EQ(fastest_of({network(1), network(10)}), 1u);
  EXPECT_EQ(fastest_of({network(10), network(1)}), 0u);
  EXPECT_EQ(fastest_of({network(10), network(12)}), 0u);  // within the noise
  EXPECT_EQ(fastest_of({network(1), network(10), network(25), network(4)}), 2u);
}

TEST(FastestNetwork, OfNetworksThatAreAsFastHasTheFasterDriver) {
  EXPECT_EQ(fastest_of({network(20, 25'000), network(19, 100'000)}), 1u);
  EXPECT_EQ(fastest_of({network(20, 100'000), network(24, 25'000)}), 0u);
  EXPECT_EQ(fastest_of({network(20, 0), network(20, 100'000)}), 0u);      // unknown
  EXPECT_EQ(fastest_of({network(20, 25'000), network(4, 100'000)}), 0u);  // the driver's word alone
}

TEST(FastestNetwork, MustReachAllHosts) {
  EXPECT_EQ(fastest_of({network(1, 1'000), network(0, 100'000)}), 0u);
  EXPECT_EQ(fastest_of({network(0, 1'000), network(1)}), 1u);
}

TEST(FastestNetwork, MpiMustHaveTwiceTheRate) {
  auto mpi = network(1.9);
  mpi.name = kMpi;
  EXPECT_EQ(fastest_of({network(1), mpi}), 0u);
  mpi.rate *= 2;
  EXPECT_EQ(fastest_of({network(1), mpi}), 1u);
  EXPECT_EQ(fastest_of({network(1, 10'000), mpi, network(3.1, 100'000)}), 1u);
  EXPECT_EQ(fastest_of({network(0), mpi}), 1u);
  mpi.rate = 0;
  EXPECT_EQ(fastest_of({network(0), mpi}), 0u);
}

/// Messages that take `pause` and move nothing.
class TimedCommunicator final : public detail::Communicator {
 public:
  using Clock = std::chrono::steady_clock;
  struct Timer : Transfer {
    explicit Timer(Clock::duration pause) : done(Clock::now() + pause) {}
    bool test() override { return Clock::now() >= done; }
    const Clock::time_point done;
  };

  TimedCommunicator(std::shared_ptr<Communicator> inner, Clock::duration pause)
      : inner_(std::move(inner)), pause_(pause) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string refuses_threads() const override { return ""; }
  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override {
    return inner_->all_gather(mine, deadline);
  }
  std::shared_ptr<Communicator> subset(const std::vector<int>& ranks, int number) override {
    return std::make_shared<TimedCommunicator>(inner_->subset(ranks, number), pause_);
  }
  std::unique_ptr<Transfer> send(at::Tensor, int, int) override {
    return std::make_unique<Timer>(pause_);
  }
  std::unique_ptr<Transfer> receive(at::Tensor, int, int) override {
    return std::make_unique<Timer>(pause_);
  }

 private:
  const std::shared_ptr<Communicator> inner_;
  const Clock::duration pause_;
};

/// The routes of four ranks on two hosts whose MPI takes `pause` for each message; below 0: they
/// have none.
std::vector<Route> routes(std::chrono::milliseconds pause) {
  const std::vector<int> hosts{0, 0, 2, 2};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto communicators = testing::ThreadCommunicator::make(4);
  std::vector<Route> routes(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      auto world = World::start(rank, 4, {.timeout = std::chrono::seconds(20)});
      world.store = store;
      world.hosts = hosts;
      world.same_host = false;
      world.address = "127.0.0.1";
      if (pause.count() >= 0)
        world.start_group.communicator =
            std::make_shared<TimedCommunicator>(communicators[rank], pause);
      routes[rank] = fastest_route(world, {});
    });
  }
  for (auto& thread : threads) thread.join();
  return routes;
}

TEST(FastestRoute, IsMpiIfItIsMeasuredFaster) {
  for (const auto& [milliseconds, over_mpi] : {std::pair{-1, false}, {0, true}, {300, false}}) {
    auto found = routes(std::chrono::milliseconds(milliseconds));
    // On a busy machine the threads of this MPI may wait for a core.
    for (int i = 0; i < 4 && found[0].over_mpi != over_mpi; ++i)
      found = routes(std::chrono::milliseconds(milliseconds));
    for (const auto& route : found) {
      EXPECT_EQ(route.over_mpi, over_mpi) << milliseconds;
      EXPECT_EQ(route.address, "127.0.0.1");
    }
  }
}

TEST(NetworkInterfaces, HaveAnAddressInTheirNetwork) {
  for (const auto& each : network_interfaces()) {
    EXPECT_FALSE(is_loopback(each.address)) << each.name;
    EXPECT_NE(each.network.find('/'), std::string::npos) << each.network;
    EXPECT_EQ(address_of_interface(each.name, 0).empty(), false);
    EXPECT_GE(each.speed, 0);
  }
}

}  // namespace
}  // namespace tessera::comm
