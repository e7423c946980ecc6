// The choice between networks that were measured. tests/integration/networks_test.py measures some.
#include "comm/p2p/fastest_network.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

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
