// Groups of ProcessGroup::with_wire(). The ranks are threads of one process, so their hosts are
// numbers.
#include <chrono>
#include <future>
#include <numeric>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/base/wire_codec.h"
#include "comm/hosts/host_map.h"
#include "harness/batches.h"
#include "harness/ranks.h"

namespace tessera::testing {
namespace {

using comm::HostMap;
using comm::WireFeedback;
using comm::WireFeedbackScope;
using ::testing::HasSubstr;

const std::vector<std::vector<int>> kPlacements{{0, 1},       {0, 1, 2},       {0, 0, 1, 1},
                                                {0, 0, 0, 1}, {0, 1, 0, 1, 1}, {0, 0, 1, 1, 2, 2}};
constexpr WireFormat kEncoded[] = {WireFormat::bfloat16, WireFormat::int8};

at::Tensor values_of(int64_t numel, int rank) { return random_batch({numel}, 100 + rank); }

at::Tensor rounded(WireFormat format, const at::Tensor& values) {
  return comm::decode(format, comm::encode(format, values), values.numel());
}

/// The sum over ranks of `part` of each rank's values, as `owner`'s host gets it.
at::Tensor expected_sum(const std::vector<int>& hosts, WireFormat format, int owner, int64_t numel,
                        int64_t begin, int64_t count) {
  const HostMap map(hosts);
  std::vector<at::Tensor> sums;
  for (int host = 0; host < map.hosts(); ++host) {
    std::vector<at::Tensor> values;
    for (const int rank : map.members(host))
      values.push_back(values_of(numel, rank).narrow(0, begin, count));
    // At most three ranks share a host here.
    auto sum = values[0].clone();
    for (size_t i = 1; i < values.size(); ++i) sum += values[i];
    sums.push_back(host == map.host_of(owner) ? sum : rounded(format, sum));
  }
  auto total = sums[0];
  for (size_t i = 1; i < sums.size(); ++i) total = total + sums[i];
  return total;
}

/// A size that one round of messages holds.
constexpr int64_t kNumel = 5000;

TEST(Wire, SumsAreRoundedOnceForEachOtherHost) {
  for (const auto& hosts : kPlacements) {
    for (const auto format : kEncoded) {
      SCOPED_TRACE(::testing::PrintToString(hosts) + " " + to_string(format));
      run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
        auto wire = group.with_wire(format);
        std::vector<int64_t> counts(hosts.size(), 0);
        counts[0] = kNumel - 700;
        counts.back() += 700;
        const auto flat = values_of(kNumel, rank).clone();
        wire.reduce_scatter(flat, counts);
        const int64_t begin = rank == 0 ? 0 : kNumel - 700;
        if (counts[rank] == 0) return;
        EXPECT_TRUE(at::equal(flat.narrow(0, begin, counts[rank]),
                              expected_sum(hosts, format, rank, kNumel, begin, counts[rank])));
      });
    }
  }
}

TEST(Wire, AMeanOfFloat16IsInRangeWhereItsSumIsNot) {
  for (const auto& hosts : kPlacements) {
    for (const auto format : kEncoded) {
      SCOPED_TRACE(::testing::PrintToString(hosts) + " " + to_string(format));
      run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
        auto wire = group.with_wire(format);
        const auto values = at::full({kNumel}, 40000, at::kHalf);
        auto all = values.clone();
        const double scale = 1.0 / group.size();
        wire.all_reduce(all, scale);
        EXPECT_LE((all.to(at::kFloat) - 40000).abs().max().item<float>(), 400);
        std::vector<int64_t> counts(hosts.size(), kNumel / group.size());
        counts.back() += kNumel % group.size();
        wire.reduce_scatter_each(
            values, counts,
            [](int64_t, const at::Tensor& run) {
              EXPECT_LE((run.to(at::kFloat) - 40000).abs().max().item<float>(), 400);
            },
            scale);
      });
    }
  }
}

TEST(Wire, AnAllReduceHasTheSameBitsOnAllRanks) {
  for (const auto& hosts : kPlacements) {
    for (const auto format : kEncoded) {
      for (const int64_t numel : {int64_t{1}, int64_t{1000}, int64_t{1} << 20}) {
        SCOPED_TRACE(::testing::PrintToString(hosts) + " " + to_string(format));
        run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
          auto wire = group.with_wire(format);
          const int size = group.size();
          auto found = values_of(numel, rank).clone();
          wire.all_reduce(found, 1.0 / size);
          auto exact = values_of(numel, rank).clone();
          group.all_reduce(exact, 1.0 / size);
          const double tolerance = format == WireFormat::int8 ? 0.05 : 0.02;
          EXPECT_LE((found - exact).abs().max().item<double>(), tolerance);
          if (numel > 1) EXPECT_FALSE(at::equal(found, exact));
          auto first = found.clone();
          group.broadcast(first, 0);
          EXPECT_TRUE(at::equal(found, first));
        });
      }
    }
  }
}

TEST(Wire, AGatherIsRoundedOnItsOwnerToo) {
  for (const auto& hosts : kPlacements) {
    for (const auto format : kEncoded) {
      for (const auto dtype : {at::kFloat, at::kHalf}) {
        SCOPED_TRACE(::testing::PrintToString(hosts) + " " + to_string(format));
        run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
          auto wire = group.with_wire(format);
          std::vector<int64_t> counts;
          for (size_t r = 0; r < hosts.size(); ++r)
            counts.push_back(r == 1 ? 0 : 300 * static_cast<int64_t>(r + 1));
          const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
          auto flat = at::zeros({total}, dtype);
          int64_t begin = 0;
          for (size_t r = 0; r < hosts.size(); begin += counts[r++])
            if (static_cast<int>(r) == rank)
              flat.narrow(0, begin, counts[r]).copy_(values_of(counts[r], rank));
          wire.all_gather(flat, counts);
          begin = 0;
          for (size_t r = 0; r < hosts.size(); begin += counts[r++]) {
            const auto values = values_of(counts[r], static_cast<int>(r)).to(dtype);
            EXPECT_TRUE(
                at::equal(flat.narrow(0, begin, counts[r]), rounded(format, values).to(dtype)));
          }
        });
      }
    }
  }
}

TEST(Wire, ErrorFeedbackMakesTheSumOfManyStepsExact) {
  for (const auto& hosts : kPlacements) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      auto wire = group.with_wire(WireFormat::int8);
      const auto own = values_of(kNumel, rank);
      auto exact = own.clone();
      group.all_reduce(exact);
      const auto error_of = [&](bool with_feedback) {
        const auto feedback = std::make_shared<WireFeedback>();
        auto sum = at::zeros({kNumel});
        constexpr int kSteps = 20;
        for (int step = 0; step < kSteps; ++step) {
          auto flat = own.clone();
          if (with_feedback) {
            const WireFeedbackScope scope(feedback);
            wire.all_reduce_async(flat).wait();
          } else {
            wire.all_reduce(flat);
          }
          feedback->commit();
          sum += flat;
        }
        return (sum / kSteps - exact).abs().max().item<double>();
      };
      EXPECT_LE(error_of(true), error_of(false) / 5);
    });
  }
}

TEST(Wire, OtherDtypesAndCollectivesAreExact) {
  run_ranks_on({0, 0, 1}, [](ProcessGroup group, int rank) {
    auto wire = group.with_wire(WireFormat::int8);
    auto whole = at::arange(1000, at::kLong) * 1001 + rank;
    wire.all_reduce(whole);
    EXPECT_TRUE(at::equal(whole, at::arange(1000, at::kLong) * 3003 + 3));
    auto sent = values_of(1000, 1).clone();
    if (rank != 1) sent.zero_();
    wire.broadcast(sent, 1);
    EXPECT_TRUE(at::equal(sent, values_of(1000, 1)));
    EXPECT_EQ(wire.all_gather_bytes(std::to_string(rank)).back(), "2");
  });
}

TEST(Wire, OneHostAndFloat32AreTheGroupItself) {
  run_ranks_on({0, 0}, [](ProcessGroup group, int) {
    EXPECT_EQ(group.with_wire(WireFormat::int8).impl(), group.impl());
    EXPECT_EQ(group.stats().calls(), 0U);
  });
  run_ranks_on({0, 1}, [](ProcessGroup group, int) {
    EXPECT_EQ(group.with_wire(WireFormat::float32).impl(), group.impl());
  });
  EXPECT_EQ(ProcessGroup().with_wire(WireFormat::int8).size(), 1);
}

/// The ranks compare the collectives of both groups in their order, so none waits for the time-out.
TEST(Wire, ARankThatCallsAnotherCollectiveIsNoticedAtOnce) {
  for (const auto& hosts : {std::vector<int>{0, 1}, {0, 0, 1}}) {
    for (const bool in_background : {false, true}) {
      SCOPED_TRACE(::testing::PrintToString(hosts) + (in_background ? " in the background" : ""));
      const auto begin = std::chrono::steady_clock::now();
      run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
        auto wire = group.with_wire(WireFormat::int8);
        const auto sum_in = [&](ProcessGroup& own) {
          if (in_background) own.all_reduce_async(at::ones({1000}), 1, "gradients").wait();
          else own.all_reduce(at::ones({1000}), 1, "gradients");
        };
        try {
          sum_in(rank == 1 ? group : wire);
          ADD_FAILURE() << "no error on rank " << rank;
        } catch (const UsageError& error) {
          EXPECT_THAT(error.what(), HasSubstr("rank 0 calls all_reduce"));
          EXPECT_THAT(error.what(), HasSubstr("(gradients, as int8), rank 1"));
          EXPECT_THAT(error.what(), HasSubstr("(gradients);"));
        }
        // Nothing was moved, and no collective throws the error again.
        for (auto* const own : {&group, &wire}) {
          auto ones = at::ones({1000});
          own->all_reduce(ones);
          EXPECT_TRUE(at::allclose(ones, at::full({1000}, static_cast<double>(hosts.size()))));
        }
      });
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    }
  }
}

TEST(Wire, AnEncodedGroupOfAnEncodedGroupIsComparedToo) {
  const auto begin = std::chrono::steady_clock::now();
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    auto first = group.with_wire(WireFormat::int8);
    auto second = first.with_wire(WireFormat::bfloat16);
    EXPECT_THROW((rank == 0 ? first : second).all_reduce(at::ones({1000})), UsageError);
    auto ones = at::ones({1000});
    second.all_reduce(ones);
    EXPECT_TRUE(at::equal(ones, at::full({1000}, 2)));
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

/// As with one group: an error that nobody has waited for is thrown by the next collective.
TEST(Wire, ADisagreementThatNobodyWaitedForIsThrownByTheNextCollective) {
  for (const bool in_group : {false, true}) {
    run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
      auto wire = group.with_wire(WireFormat::int8);
      const auto first = wire.all_reduce_async(at::ones({8}), 1, rank == 0 ? "a" : "b");
      try {
        auto& next = in_group ? group : wire;
        next.all_reduce(at::ones({8}));
        ADD_FAILURE() << "no error on rank " << rank;
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr("(a, as int8), rank 1"));
      }
      group.barrier();
    });
  }
}

TEST(Wire, AFailureInformsTheRanksOfAnEncodedCollective) {
  for (const bool in_wire : {false, true}) {
    const auto begin = std::chrono::steady_clock::now();
    const auto errors =
        run_ranks_catching(3,
                           [&](ProcessGroup group, int rank) {
                             auto wire = group.with_wire(WireFormat::int8);
                             if (rank == 2)
                               (in_wire ? wire : group).fail("rank 2 has read a wrong file");
                             // Longer than a rank that fails waits for the last of several groups.
                             std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                             wire.all_reduce(at::ones({1000}));
                           },
                           {}, {0, 0, 1});
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_THAT(message_of(error), HasSubstr("rank 2 has read a wrong file"));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  }
}

TEST(Wire, ItEndsWhileItsCollectiveWaitsForAnotherRank) {
  std::promise<void> ended;
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    auto wire = group.with_wire(WireFormat::int8);
    if (rank == 1) {  // it is there, and calls nothing
      ended.get_future().wait_for(std::chrono::seconds(60));
      return;
    }
    auto work = wire.all_reduce_async(at::ones({1000}));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it has begun by then
    EXPECT_FALSE(work.done());
    const auto begin = std::chrono::steady_clock::now();
    wire = ProcessGroup();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_THROW(work.wait(), BrokenWorldError);
    ended.set_value();
  });
}

template <class Body>
std::vector<std::string> messages_of(const Body& body, ProcessGroupOptions options = {}) {
  std::vector<std::string> messages;
  for (const auto& error : run_ranks_catching(3, body, options, {0, 0, 1})) {
    EXPECT_TRUE(error);
    messages.push_back(message_of(error));
  }
  return messages;
}

TEST(Wire, ImpossibleUsesAreErrors) {
  for (const auto& message : messages_of([](ProcessGroup group, int) {
         group.with_wire(WireFormat::int8).all_reduce(at::zeros({3}, at::kDouble));
       }))
    EXPECT_THAT(message, HasSubstr("dtype Double cannot travel as int8; expected float32"));
  for (const auto& message : messages_of([](ProcessGroup group, int) {
         group.with_wire(WireFormat::bfloat16).all_gather(at::zeros({3}, at::kDouble));
       }))
    EXPECT_THAT(message, ::testing::AllOf(HasSubstr("all_gather: rank"),
                                          HasSubstr("dtype Double cannot travel as bfloat16")));
  for (const auto& message : messages_of([](ProcessGroup group, int rank) {
         group.with_wire(rank == 1 ? WireFormat::int8 : WireFormat::bfloat16);
       }))
    EXPECT_THAT(message, HasSubstr("int8"));
  ProcessGroupOptions checked;
  checked.check_results = true;
  for (const auto& message :
       messages_of([](ProcessGroup group, int) { group.with_wire(WireFormat::int8); }, checked))
    EXPECT_THAT(message, HasSubstr("with_wire: rank"));
}

// A wrapper that is destroyed while it reduces left the group's thread a dead pointer.
TEST(WireFeedbackLifetime, ACollectiveThatRunsOwnsItsFeedback) {
  std::promise<void> checked;
  auto checked_future = checked.get_future().share();
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    auto wire = group.with_wire(WireFormat::int8);
    if (rank == 1) checked_future.wait();
    auto feedback = std::make_shared<WireFeedback>();
    const std::weak_ptr<WireFeedback> watch = feedback;
    Work work;
    {
      const WireFeedbackScope scope(feedback);
      work = wire.all_reduce_async(at::ones({300}));
    }
    feedback.reset();
    if (rank == 0) {
      EXPECT_FALSE(watch.expired());  // rank 1 has not begun
      checked.set_value();
    }
    work.wait();
  });
}

}  // namespace
}  // namespace tessera::testing
