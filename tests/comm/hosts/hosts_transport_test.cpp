// Groups on several hosts: shared memory within a host, messages between hosts. The ranks are
// threads of one process, so their hosts are numbers.
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <thread>

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/hosts/host_map.h"
#include "harness/means.h"
#include "harness/ranks.h"

namespace {

using tessera::BrokenWorldError;
using tessera::ProcessGroup;
using tessera::comm::HostMap;
using tessera::comm::HostSumTree;
using tessera::testing::message_of;
using tessera::testing::run_ranks_catching;
using tessera::testing::run_ranks_on;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<std::vector<int>> kPlacements{{0, 0, 1},
                                                {0, 0, 1, 1},
                                                {0, 0, 0, 1},
                                                {0, 1, 0, 1},
                                                {5, 3, 3, 5, 3},
                                                {0, 0, 1, 1, 2, 2},
                                                {0, 0, 0, 0, 1, 1, 1, 1}};

bool is_narrow(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

/// Rank r's values, chosen so that sums in another order or another precision differ.
at::Tensor values(int64_t n, int r, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + r);
  if (at::isIntegralType(dtype, true)) return at::randint(0, 100, {n}, generator).to(dtype);
  return (at::rand({n}, generator) - 0.5).mul(std::pow(10.0, r % 3)).to(dtype);
}

at::Tensor sum_of(int64_t n, int first, int count, at::ScalarType dtype) {
  if (count == 1) return values(n, first, dtype).to(is_narrow(dtype) ? at::kFloat : dtype);
  int left = 1;
  while (2 * left < count) left *= 2;
  return sum_of(n, first, left, dtype) + sum_of(n, first + left, count - left, dtype);
}

at::Tensor expected_sum(int64_t n, size_t size, at::ScalarType dtype) {
  return sum_of(n, 0, static_cast<int>(size), dtype).to(dtype);
}

/// Some segments are empty, and one is larger than a round.
std::vector<int64_t> uneven_counts(size_t size, int64_t unit) {
  std::vector<int64_t> counts(size, 0);
  for (size_t r = 0; r < size; ++r) counts[r] = r % 3 == 1 ? 0 : unit * static_cast<int64_t>(r + 1);
  return counts;
}

int64_t total(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

int64_t start_of(const std::vector<int64_t>& counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
}

using Body = std::function<void(ProcessGroup group, int rank, size_t size, bool shared)>;

/// With tensors in memory of allocate() and in other memory.
void on_each_placement(const Body& body) {
  for (const auto& hosts : kPlacements) {
    for (const bool shared : {false, true}) {
      SCOPED_TRACE(::testing::PrintToString(hosts) + (shared ? " shared" : ""));
      run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
        ASSERT_EQ(group.backend_name(), "tcp");
        const auto memory = group.allocate(1, at::kFloat);
        for (size_t peer = 0; peer < hosts.size();
             ++peer)  // the two levels, and not messages alone
          ASSERT_EQ(group.peer_view(memory, static_cast<int>(peer)).defined(),
                    hosts[peer] == hosts[rank]);
        body(group, rank, hosts.size(), shared);
      });
    }
  }
}

at::Tensor placed(ProcessGroup& group, const at::Tensor& content, bool shared) {
  return shared ? group.allocate(content.numel(), content.options()).copy_(content)
                : content.clone();
}

TEST(HostSumTree, IsCutIntoBlocksOfOneHost) {
  const HostSumTree even(HostMap({0, 0, 1, 1}));
  ASSERT_EQ(even.nodes.size(), 3U);
  EXPECT_THAT(even.nodes[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(even.nodes[1].ranks, ElementsAre(2, 3));
  const HostSumTree uneven(HostMap({0, 0, 0, 1}));
  ASSERT_EQ(uneven.nodes.size(), 5U);
  EXPECT_THAT(uneven.nodes[0].ranks, ElementsAre(0, 1));
  EXPECT_THAT(uneven.leaves[0], ElementsAre(0, 1));
  EXPECT_THAT(uneven.leaves[1], ElementsAre(2));
  EXPECT_EQ(HostSumTree(HostMap({0, 1, 0, 1})).nodes.size(), 7U);
}

TEST(Hosts, AllReduceHasTheBitsOfOneHost) {
  on_each_placement([](ProcessGroup group, int rank, size_t size, bool shared) {
    for (const int64_t n : {0, 1, 5, 1001, 200001}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kLong, at::kBFloat16, at::kHalf}) {
        auto tensor = placed(group, values(n, rank, dtype), shared);
        group.all_reduce(tensor);
        ASSERT_TRUE(at::equal(tensor, expected_sum(n, size, dtype)))
            << n << " " << c10::toString(dtype);
      }
    }
    // More windows than the hosts have in flight.
    auto large = placed(group, values(1500001, rank, at::kFloat), shared);
    group.all_reduce(large);
    ASSERT_TRUE(at::equal(large, expected_sum(1500001, size, at::kFloat)));
    auto mean = placed(group, values(999, rank, at::kFloat), shared);
    group.all_reduce(mean, 1.0 / 8);
    ASSERT_TRUE(at::equal(mean, expected_sum(999, size, at::kFloat).mul_(1.0 / 8)));
  });
}

TEST(Hosts, MeansOf16BitsAreScaledBeforeTheyAreRounded) {
  for (const auto& hosts : kPlacements) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    run_ranks_on(hosts, [](ProcessGroup group, int) {
      EXPECT_EQ(tessera::testing::first_wrong_mean(group), "");
    });
  }
}

/// The bytes that all ranks send to other hosts in `gather`, which every rank calls.
int64_t sent_in(ProcessGroup& group, const std::function<void()>& gather) {
  const auto sent = [&] { return static_cast<int64_t>(group.impl()->transport->sent().bytes); };
  group.barrier();
  const auto before = sent();
  gather();
  auto total = at::full({1}, sent() - before, at::kLong);
  group.all_reduce(total);
  return total.item<int64_t>();
}

TEST(Hosts, EachHostHasItsCommonMemory) {
  on_each_placement([](ProcessGroup group, int rank, size_t size, bool shared) {
    if (shared) return;
    for (const int64_t unit : {1, 50000}) {
      const auto counts = uneven_counts(size, unit);
      const auto numel = std::accumulate(counts.begin(), counts.end(), int64_t{0});
      auto common = group.allocate_common(numel, at::kFloat);
      ASSERT_TRUE(common.defined());
      int64_t begin = 0;
      for (int r = 0; r < rank; ++r) begin += counts[r];
      group.barrier();
      common.narrow(0, begin, counts[rank]).fill_(rank + 1);
      auto whole = group.allocate(numel, at::kFloat).copy_(common);
      const auto once = sent_in(group, [&] { group.all_gather(common, counts); });
      const auto copies = sent_in(group, [&] { group.all_gather(whole, counts); });
      ASSERT_TRUE(at::equal(common, whole)) << unit;
      EXPECT_EQ(once, copies) << "each host receives once what others own";
      begin = 0;
      for (size_t r = 0; r < size; begin += counts[r++])
        EXPECT_TRUE(
            common.narrow(0, begin, counts[r]).eq(static_cast<float>(r + 1)).all().item<bool>());
      group.barrier();
    }
  });
}

TEST(Hosts, ReduceScatterAndAllGatherOfUnevenSegments) {
  on_each_placement([](ProcessGroup group, int rank, size_t size, bool shared) {
    for (const int64_t unit : {1, 333, 50000}) {
      const auto counts = uneven_counts(size, unit);
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const auto input = values(total(counts), rank, dtype);
        const auto sum = expected_sum(total(counts), size, dtype);
        auto flat = placed(group, input, shared);
        auto consumed = at::zeros({counts[rank]}, dtype);
        int64_t next = 0;
        group.reduce_scatter_each(flat, counts, [&](int64_t offset, const at::Tensor& run) {
          ASSERT_EQ(offset, next);
          next += run.numel();
          consumed.narrow(0, offset, run.numel()).copy_(run);
        });
        ASSERT_EQ(next, counts[rank]);
        const auto own = sum.narrow(0, start_of(counts, rank), counts[rank]);
        ASSERT_TRUE(at::equal(consumed, own)) << unit << c10::toString(dtype);
        ASSERT_TRUE(at::equal(flat, input)) << "consuming does not modify the input";
        flat.narrow(0, start_of(counts, rank), counts[rank]).copy_(own);
        group.all_gather(flat, counts);
        ASSERT_TRUE(at::equal(flat, sum)) << unit << c10::toString(dtype);
      }
    }
  });
}

/// More than one stripe, of which each is copied within the hosts while the wire carries the next.
TEST(Hosts, AllGatherOfManyStripes) {
  on_each_placement([](ProcessGroup group, int rank, size_t size, bool shared) {
    std::vector<int64_t> counts(size, 700001);
    counts[1] = 1500007;
    counts.back() = 0;
    for (int round = 0; round < 2; ++round) {
      const auto whole = values(total(counts), round, at::kFloat);
      auto flat = placed(group, at::full({total(counts)}, -1, at::kFloat), shared);
      const auto own = start_of(counts, rank);
      flat.narrow(0, own, counts[rank]).copy_(whole.narrow(0, own, counts[rank]));
      group.all_gather(flat, counts);
      ASSERT_TRUE(at::equal(flat, whole)) << round;
    }
  });
}

TEST(Hosts, ReduceAndBroadcastFromEachRoot) {
  on_each_placement([](ProcessGroup group, int rank, size_t size, bool shared) {
    for (int root = 0; root < static_cast<int>(size); ++root) {
      for (const int64_t n : {3, 100000}) {
        const auto input = values(n, rank, at::kFloat);
        auto flat = placed(group, input, shared);
        group.reduce(flat, root);
        ASSERT_TRUE(at::equal(flat, rank == root ? expected_sum(n, size, at::kFloat) : input));
        flat.copy_(input);
        group.broadcast(flat, root);
        ASSERT_TRUE(at::equal(flat, values(n, root, at::kFloat)));
      }
    }
  });
}

TEST(Hosts, AllToAllAndBytes) {
  on_each_placement([](ProcessGroup group, int rank, size_t size, bool) {
    std::vector<int64_t> send, receive;
    for (int peer = 0; peer < static_cast<int>(size); ++peer) {
      send.push_back((rank + 2 * peer) % 4 * 1000);
      receive.push_back((peer + 2 * rank) % 4 * 1000);
    }
    std::vector<at::Tensor> parts, expected;
    for (int peer = 0; peer < static_cast<int>(size); ++peer) {
      parts.push_back(at::full({send[peer]}, 100.0 * rank + peer));
      expected.push_back(at::full({receive[peer]}, 100.0 * peer + rank));
    }
    auto output = at::zeros({total(receive)});
    group.all_to_all(output, at::cat(parts), receive, send);
    ASSERT_TRUE(at::equal(output, at::cat(expected)));
    const auto bytes = group.all_gather_bytes(std::string(static_cast<size_t>(rank), 'x'));
    for (size_t r = 0; r < size; ++r) ASSERT_EQ(bytes[r], std::string(r, 'x'));
    group.barrier();
  });
}

TEST(Hosts, AnErrorOfAConsumerLeavesTheOthersWhole) {
  const auto errors =
      run_ranks_catching(4,
                         [](ProcessGroup group, int rank) {
                           auto flat = values(400000, rank, at::kFloat);
                           const std::vector<int64_t> counts(4, 100000);
                           group.reduce_scatter_each(flat, counts, [&](int64_t, const at::Tensor&) {
                             if (rank == 2) throw std::runtime_error("its own trouble");
                           });
                           group.barrier();
                         },
                         {}, {0, 0, 1, 1});
  EXPECT_EQ(message_of(errors[2]), "its own trouble");
  for (const int rank : {0, 1, 3})
    EXPECT_THAT(message_of(errors[rank]), HasSubstr("rank 2 ")) << rank;
}

TEST(Hosts, ARankThatLeavesIsNamedOnAllHosts) {
  for (int gone = 0; gone < 4; ++gone) {
    const auto errors = run_ranks_catching(4,
                                           [&](ProcessGroup group, int rank) {
                                             for (int step = 0;; ++step) {
                                               if (rank == gone && step == 3)
                                                 throw std::runtime_error("its own trouble");
                                               auto flat = values(100000, rank, at::kFloat);
                                               group.all_reduce(flat);
                                             }
                                           },
                                           {}, {0, 0, 1, 1});
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == gone) continue;
      EXPECT_THAT(message_of(errors[rank]), HasSubstr("rank " + std::to_string(gone) + " "))
          << rank;
    }
  }
}

std::vector<int> blamed_by(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const BrokenWorldError& broken) {
    return broken.ranks();
  } catch (const std::exception&) {
  }
  return {};
}

TEST(Hosts, ARankThatLeavesWithACollectiveUnderWayIsNamedOnAllHosts) {
  for (const auto& hosts : {std::vector{0, 0, 1, 1}, std::vector{0, 0, 0, 1}}) {
    for (int gone = 0; gone < 4; ++gone) {
      const auto errors = run_ranks_catching(
          4,
          [&](ProcessGroup group, int rank) {
            auto flat = values(100000, rank, at::kFloat), other = flat.clone();
            group.all_reduce(flat);
            if (rank == gone) {
              const auto work = group.all_reduce_async(other);
              std::this_thread::sleep_for(std::chrono::milliseconds(100));
              throw std::runtime_error("its own trouble");
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
            group.all_reduce(other);
          },
          {}, hosts);
      for (int rank = 0; rank < 4; ++rank)
        if (rank != gone) EXPECT_THAT(blamed_by(errors[rank]), ElementsAre(gone)) << rank;
    }
  }
}

/// ZeroRedundancyOptimizer reduces gradients that the program may still change, and then reduces
/// them again.
TEST(Hosts, BytesThatChangeWhileTheyTravelAreNoDamage) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    constexpr int64_t kNumel = 8 << 20;
    auto flat = at::zeros({kNumel}), sum = at::empty({kNumel / 2});
    auto work = group.reduce_scatter_into_async(flat, {kNumel / 2, kNumel / 2}, sum, 1, "changes");
    for (int i = 0; i < 40; ++i) flat.fill_(i + rank);
    work.wait();
    group.barrier();
  });
}

}  // namespace
