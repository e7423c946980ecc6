#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "harness/means.h"
#include "harness/ranks.h"
#include "tessera/detail/c10d.h"
#include "tessera/error.h"

namespace {

using tessera::Backend;
using tessera::BrokenWorldError;
using tessera::ProcessGroup;
using tessera::UsageError;
using tessera::testing::message_of;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_catching;
using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Setting {
  int world;
  Backend backend;
  bool check_results = false;
};

class Collectives : public ::testing::TestWithParam<Setting> {
 protected:
  int world() const { return GetParam().world; }
  void each_rank(const tessera::testing::RankBody& body) { run_ranks(world(), body, options()); }
  tessera::ProcessGroupOptions options() const {
    tessera::ProcessGroupOptions options;
    options.backend = GetParam().backend;
    options.check_results = GetParam().check_results;
    return options;
  }
};

/// For tests that need at least two ranks.
class SeveralRanks : public Collectives {};

at::Tensor pattern(int64_t n, int rank, at::ScalarType dtype = at::kFloat) {
  return ((at::arange(n, at::kLong) * 7 + rank * 13) % 31).to(dtype);
}

at::Tensor sum_of_patterns(int64_t n, int world, at::ScalarType dtype = at::kFloat) {
  auto sum = pattern(n, 0, dtype);
  for (int r = 1; r < world; ++r) sum = sum + pattern(n, r, dtype);
  return sum;
}

const std::vector<int64_t> kSizes{0, 1, 2, 3, 7, 4099, 300001};

TEST_P(Collectives, AllReduceSumsEverySizeAndDtype) {
  each_rank([&](ProcessGroup group, int rank) {
    for (auto n : kSizes) {
      for (auto dtype : {at::kFloat, at::kDouble, at::kLong, at::kInt, at::kBFloat16, at::kHalf}) {
        auto tensor = pattern(n, rank, dtype);
        group.all_reduce(tensor);
        ASSERT_TRUE(at::equal(tensor, sum_of_patterns(n, world(), dtype)))
            << n << " " << c10::toString(dtype);
      }
    }
  });
}

TEST_P(Collectives, MeansOf16BitsAreScaledBeforeTheyAreRounded) {
  each_rank(
      [&](ProcessGroup group, int) { EXPECT_EQ(tessera::testing::first_wrong_mean(group), ""); });
}

TEST_P(Collectives, ConjugateAndNegativeViewsHaveTheirValues) {
  each_rank([&](ProcessGroup group, int rank) {
    const auto memory = pattern(6, rank), sum = sum_of_patterns(6, world());
    auto negative = at::_neg_view(memory);
    ASSERT_TRUE(negative.is_neg() && negative.is_contiguous());
    group.all_reduce(negative);
    EXPECT_TRUE(at::equal(negative, -sum));
    EXPECT_TRUE(at::equal(memory, sum)) << "written through the view";

    const auto complex = [&](int r) { return at::complex(pattern(3, r), pattern(3, r) + 1); };
    const auto own = complex(rank);
    auto conjugate = own.conj();
    ASSERT_TRUE(conjugate.is_conj());
    group.broadcast(conjugate, world() - 1);
    EXPECT_TRUE(at::equal(conjugate, complex(world() - 1).conj()));
    EXPECT_TRUE(at::equal(own, complex(world() - 1)));
    // On the root alone, whose values are those of the view.
    auto mixed = rank == 0 ? complex(0).conj() : complex(rank);
    group.broadcast(std::vector<at::Tensor>{mixed}, 0);
    EXPECT_TRUE(at::equal(mixed, complex(0).conj()));
    EXPECT_TRUE(at::equal(group.all_gather(at::_neg_view(at::ones({1}))), -at::ones({world()})));

    // On rank 0 alone, too.
    for (const bool all : {true, false}) {
      auto summed = complex(rank), reduced = complex(rank);
      at::Tensor expected = at::zeros_like(summed);
      for (int r = 0; r < world(); ++r) expected += all || r == 0 ? complex(r).conj() : complex(r);
      const auto view = [&](const at::Tensor& tensor) {
        return all || rank == 0 ? tensor.conj() : tensor;
      };
      auto sum_view = view(summed), reduced_view = view(reduced);
      group.all_reduce(sum_view);
      EXPECT_TRUE(at::allclose(sum_view, expected));
      group.reduce(reduced_view, 0);
      EXPECT_TRUE(at::allclose(reduced_view, rank == 0 ? expected : view(complex(rank))));
    }

    const std::vector<int64_t> counts(world(), 1);
    const auto flat = at::_neg_view(at::ones({world()}));
    EXPECT_THROW(group.reduce_scatter(flat, counts), UsageError);
    EXPECT_THROW(group.all_gather(flat, counts), UsageError);
  });
}

TEST_P(Collectives, SumsHaveOneOrder) {
  each_rank([&](ProcessGroup group, int rank) {
    for (const int64_t n : {101, 70001}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        const auto value = [&](int r) {
          return (at::rand({n}, at::make_generator<at::CPUGeneratorImpl>(r + 1)) *
                  std::pow(10.0, r % 3))
              .to(dtype);
        };
        // 16-bit floats are summed in float and rounded once.
        const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
        // The left part has the largest power of two of ranks that is less than their number.
        const std::function<at::Tensor(int, int)> sum = [&](int first, int count) {
          if (count == 1) return value(first).to(wide);
          int left = 1;
          while (2 * left < count) left *= 2;
          return sum(first, left) + sum(first + left, count - left);
        };
        const auto expected = sum(0, world());
        auto tensor = value(rank);
        group.all_reduce(tensor);
        EXPECT_TRUE(at::equal(tensor, expected.to(dtype))) << n << " " << c10::toString(dtype);
      }
    }
  });
}

TEST_P(Collectives, NonContiguousAndAsync) {
  each_rank([&](ProcessGroup group, int rank) {
    auto base = pattern(24, rank).view({4, 6});
    auto tensor = base.t();
    auto work = group.all_reduce_async(tensor);
    auto second = pattern(5, rank);
    auto later = group.all_reduce_async(second);
    work.wait();
    later.wait();
    EXPECT_TRUE(later.done());
    EXPECT_TRUE(at::equal(base, sum_of_patterns(24, world()).view({4, 6})));
    EXPECT_TRUE(at::equal(second, sum_of_patterns(5, world())));
  });
}

TEST_P(Collectives, TensorsOfAnInferenceModeMayBeUsedAsynchronously) {
  each_rank([&](ProcessGroup group, int rank) {
    const c10::InferenceMode inference;
    const auto base = pattern(6, rank).view({2, 3}), flat = pattern(3, rank),
               last = pattern(6, rank).view({2, 3});
    auto works = {group.all_reduce_async(base.t()), group.all_reduce_async(flat),
                  group.broadcast_async(last.t(), 0)};
    for (auto work : works) work.wait();
    EXPECT_TRUE(at::equal(base.view({-1}), sum_of_patterns(6, world())));
    EXPECT_TRUE(at::equal(flat, sum_of_patterns(3, world())));
    EXPECT_TRUE(at::equal(last.view({-1}), pattern(6, 0)));
  });
}

TEST_P(Collectives, BroadcastAndReduceWithEveryRoot) {
  each_rank([&](ProcessGroup group, int rank) {
    for (int root = 0; root < world(); ++root) {
      for (auto n : kSizes) {
        auto tensor = pattern(n, rank);
        group.broadcast(tensor, root);
        ASSERT_TRUE(at::equal(tensor, pattern(n, root)));
        auto reduced = pattern(n, rank);
        group.reduce(reduced, root);
        ASSERT_TRUE(
            at::equal(reduced, rank == root ? sum_of_patterns(n, world()) : pattern(n, rank)))
            << n;
      }
      auto flags = at::full({3}, rank == root, at::kBool);
      group.broadcast(flags, root);
      EXPECT_TRUE(flags.all().item<bool>());
    }
    std::vector<at::Tensor> several{pattern(3, rank), pattern(2, rank, at::kLong),
                                    pattern(12, rank).view({3, 4}).t(), at::empty({0})};
    group.broadcast(several, world() - 1);
    EXPECT_TRUE(at::equal(several[1], pattern(2, world() - 1, at::kLong)));
    EXPECT_TRUE(at::equal(several[2], pattern(12, world() - 1).view({3, 4}).t()));
  });
}

TEST_P(Collectives, UnevenGatherAndScatter) {
  each_rank([&](ProcessGroup group, int rank) {
    for (int64_t scale :
         {0, 1, 5, 40000, 1'200'000}) {  // the last: own segment in several messages
      if (scale > 40000 && world() > 3) continue;
      std::vector<int64_t> counts;
      int64_t total = 0, before = 0;
      for (int r = 0; r < world(); ++r) {
        counts.push_back(scale * ((r + 1) % 3));  // some ranks have nothing
        if (r < rank) before += counts.back();
        total += counts.back();
      }
      auto flat = at::full({total}, -1.0f);
      flat.narrow(0, before, counts[rank]).copy_(pattern(total, 0).narrow(0, before, counts[rank]));
      group.all_gather(flat, counts);
      ASSERT_TRUE(at::equal(flat, pattern(total, 0)));

      const auto sum = sum_of_patterns(total, world()).narrow(0, before, counts[rank]);
      auto grads = pattern(total, rank), seen = at::zeros({counts[rank]});
      group.reduce_scatter_each(grads, counts, [&](int64_t offset, const at::Tensor& run) {
        seen.narrow(0, offset, run.numel()).copy_(run);
      });
      ASSERT_TRUE(at::equal(seen, sum));
      auto halved = at::full({counts[rank]}, -1.0f);
      group.reduce_scatter_into_async(grads, counts, halved, 0.5).wait();
      ASSERT_TRUE(at::equal(halved, sum * 0.5));
      EXPECT_THROW(group.reduce_scatter_into_async(grads, counts, at::zeros({counts[rank] + 1})),
                   UsageError);
      EXPECT_THROW(group.reduce_scatter_into_async(grads, counts, halved.to(at::kDouble)),
                   UsageError);
      auto shared = group.allocate(total, at::kFloat);
      shared.copy_(grads);
      halved.fill_(-1);
      group.reduce_scatter_into_async(shared, counts, halved, 0.5).wait();
      ASSERT_TRUE(at::equal(halved, sum * 0.5)) << "read in place";
      ASSERT_TRUE(at::equal(shared, grads)) << "left as it was";
      ASSERT_TRUE(at::equal(grads, pattern(total, rank))) << "left as it was";
      group.reduce_scatter(grads, counts);
      ASSERT_TRUE(at::equal(grads.narrow(0, before, counts[rank]), sum));
    }
    const auto all = group.all_gather(at::full({rank}, rank));
    EXPECT_EQ(all.numel(), world() * (world() - 1) / 2);
  });
}

TEST_P(Collectives, AllToAllAndBytes) {
  each_rank([&](ProcessGroup group, int rank) {
    std::vector<int64_t> send, recv;
    for (int r = 0; r < world(); ++r) {
      send.push_back(rank + r);
      recv.push_back(rank + r);
    }
    const int64_t total = std::accumulate(send.begin(), send.end(), int64_t{0});
    auto output = at::full({total}, -1);
    group.all_to_all(output, at::full({total}, rank), recv, send);
    int64_t at = 0;
    for (int r = 0; r < world(); at += recv[r++])
      EXPECT_TRUE((output.narrow(0, at, recv[r]) == r).all().item<bool>());

    const auto strings = group.all_gather_bytes(std::string(rank * 3, 'a' + rank));
    for (int r = 0; r < world(); ++r) EXPECT_EQ(strings[r], std::string(r * 3, 'a' + r));
    EXPECT_EQ(group.broadcast_bytes(rank == world() - 1 ? "hello" : "ignored", world() - 1),
              "hello");
    const auto gathered = group.gather_bytes(std::to_string(rank), 0);
    EXPECT_EQ(gathered.size(), rank == 0 ? world() : 0u);
    if (rank == 0) EXPECT_EQ(gathered.back(), std::to_string(world() - 1));
    group.barrier();
  });
}

TEST_P(Collectives, SplitMakesIndependentGroups) {
  each_rank([&](ProcessGroup group, int rank) {
    auto half = group.split(rank % 2);
    ASSERT_TRUE(half);
    auto tensor = at::full({10}, rank);
    half->all_reduce(tensor);
    int64_t expected = 0;
    for (int r = rank % 2; r < world(); r += 2) expected += r;
    EXPECT_EQ(tensor[0].item<int64_t>(), expected);
    EXPECT_EQ(half->world_ranks()[half->rank()], rank);
    EXPECT_EQ(half->timeout(), group.timeout());
    EXPECT_EQ(group.split(rank == 0 ? 0 : -1).has_value(), rank == 0);
  });
}

TEST_P(Collectives, ADuplicateRunsBesideItsGroupAndSharesItsCounters) {
  each_rank([&](ProcessGroup group, int rank) {
    auto twin = group.duplicate();
    EXPECT_EQ(twin.world_ranks(), group.world_ranks());
    group.reset_stats();
    auto tensor = at::full({10}, rank);
    tessera::Work waiting;
    if (rank == 0) waiting = group.all_reduce_async(tensor);
    twin.barrier();  // the other ranks begin the all-reduce after it
    if (rank != 0) group.all_reduce(tensor);
    waiting.wait();
    EXPECT_EQ(tensor[0].item<int64_t>(), world() * (world() - 1) / 2);
    for (const auto& stats : {group.stats(), twin.stats()}) {
      EXPECT_EQ(stats.barrier.calls, 1u);
      EXPECT_EQ(stats.all_reduce.calls, 1u);
    }
    twin.reset_stats();
    EXPECT_EQ(group.stats().calls(), 0u);

    // Rank 0 waits for the others. It counts a wait only if it is there first, which one round
    // does not ensure on a busy machine.
    for (int round = 0; round < 5; ++round) {
      twin.barrier();
      if (rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      twin.all_reduce_async(tensor).wait();
    }
    if (rank == 0 && world() > 1) EXPECT_GT(group.stats().waited_seconds, 0);
  });
}

TEST_P(Collectives, ADuplicateReadsWhatItsGroupHasAllocated) {
  each_rank([&](ProcessGroup group, int rank) {
    auto twin = group.duplicate();
    const int64_t n = 3 * world();
    auto ours = group.allocate(n, at::kFloat), theirs = twin.allocate(n, at::kFloat);
    ours.fill_(rank);
    theirs.fill_(10 + rank);
    group.barrier();
    for (int peer = 0; peer < world(); ++peer) {
      const auto seen = twin.peer_view(ours, peer), back = group.peer_view(theirs, peer);
      ASSERT_EQ(seen.defined(), peer == rank || group.backend_name() == "shm");
      if (!seen.defined()) continue;
      EXPECT_EQ(seen[n - 1].item<float>(), peer);
      EXPECT_EQ(back[0].item<float>(), 10 + peer) << "each allocation has a number of its own";
    }
    group.barrier();
    const std::vector<int64_t> counts(world(), 3);
    twin.reduce_scatter(ours, counts);
    twin.all_gather(ours, counts);
    EXPECT_EQ(ours[n - 1].item<float>(), world() * (world() - 1) / 2);
    auto mixed = rank % 2 ? theirs : ours;  // of different allocations
    mixed.fill_(rank + 1);
    twin.all_reduce(mixed);
    EXPECT_TRUE(mixed.eq(world() * (world() + 1) / 2).all().item<bool>());
  });
}

TEST_P(Collectives, SubGroupsFollowTheTimeoutUnlessTheyHaveTheirOwn) {
  using std::chrono::milliseconds;
  each_rank([&](ProcessGroup group, int) {
    auto twin = group.split(0), own = group.split(0);
    if (world() == 1) return;
    auto grandchild = twin->split(0);
    own->set_timeout(milliseconds(7001));
    group.set_timeout(milliseconds(8002));
    EXPECT_EQ(twin->timeout(), milliseconds(8002));
    EXPECT_EQ(grandchild->timeout(), milliseconds(8002));
    EXPECT_EQ(own->timeout(), milliseconds(7001));
    group.set_timeout(milliseconds(9003), milliseconds(8002));
    EXPECT_EQ(twin->timeout(), milliseconds(8002)) << "the disk of a rank is slow for one group";
    group.set_timeout(milliseconds(8002));
    group.set_timeout(milliseconds(6000));
    EXPECT_EQ(twin->timeout(), milliseconds(6000));
    group.barrier();
  });
}

TEST_P(Collectives, CountsCallsAndBytes) {
  each_rank([&](ProcessGroup group, int rank) {
    const uint64_t w = world(), n = 1200, bytes = n * 4;
    std::vector<int64_t> counts(w, n / w);
    group.reset_stats();
    auto flat = at::ones({static_cast<int64_t>(n)});
    group.all_reduce(flat);
    group.reduce_scatter(flat, counts);
    group.all_gather(flat, counts);
    group.broadcast(flat, 0);
    EXPECT_EQ(group.stats().all_reduce.calls, 1u);
    EXPECT_EQ(group.stats().all_reduce.bytes_received, 2 * bytes * (w - 1) / w);
    EXPECT_EQ(group.stats().reduce_scatter.bytes_sent, bytes * (w - 1) / w);
    EXPECT_EQ(group.stats().all_gather.bytes_received, bytes * (w - 1) / w);
    EXPECT_EQ(group.stats().broadcast.bytes_received, rank == 0 ? 0 : bytes);
  });
}

TEST_P(Collectives, AllocatedTensorsBehaveLikeOthers) {
  each_rank([&](ProcessGroup group, int rank) {
    auto flat = group.allocate(5000, at::kFloat);
    EXPECT_EQ(flat.sum().item<float>(), 0);
    flat.copy_(pattern(5000, rank));
    group.barrier();
    for (int peer = 0; peer < world(); ++peer) {
      const auto view = group.peer_view(flat, peer);
      if (view.defined()) EXPECT_TRUE(at::equal(view, pattern(5000, peer)));
    }
    group.barrier();
    group.all_reduce(flat);
    EXPECT_TRUE(at::equal(flat, sum_of_patterns(5000, world())));
  });
}

TEST_P(SeveralRanks, AllocateCommonReturnsTheSameMemoryOnEveryRank) {
  each_rank([&](ProcessGroup group, int rank) {
    auto flat = group.allocate_common(10 * world(), at::kFloat);
    EXPECT_EQ(flat.defined(), group.backend_name() == "shm");  // the others have no shared memory
    EXPECT_FALSE(group.allocate_common(0, at::kFloat).defined());
    if (!flat.defined()) return;
    EXPECT_EQ(flat.abs().sum().item<float>(), 0);
    group.barrier();
    auto own = flat.narrow(0, 10 * rank, 10);
    own.fill_(rank + 1);
    group.all_gather(flat, std::vector<int64_t>(world(), 10));
    for (int peer = 0; peer < world(); ++peer)
      EXPECT_EQ(flat[10 * peer + 9].item<float>(), peer + 1);
    group.barrier();
    group.all_reduce(own);
    EXPECT_EQ(own[0].item<float>(), world() * (world() + 1) / 2);
    group.broadcast(own, 1);
    group.barrier();
    // If the parts of only some ranks overlap, all ranks throw the same error.
    const int64_t at = rank == 0 ? 10 * (world() - 1) : 0;
    try {
      group.all_reduce(world() == 2 ? flat : flat.narrow(0, at, 10));
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(
          error.what(),
          HasSubstr(world() == 2 ? "ranks 0 and 1 passed overlapping parts of allocate_common()"
                                 : "ranks 1 and 2 passed overlapping parts"));
    }
  });
}

TEST_P(SeveralRanks, DisagreementIsAnErrorOnAllBeforeDataMoves) {
  each_rank([&](ProcessGroup group, int rank) {
    auto kept = pattern(100, rank);
    const auto fails = [&](const std::function<void()>& call, const std::string& words) {
      try {
        call();
        ADD_FAILURE() << "no error: " << words;
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr(words));
        EXPECT_THAT(error.what(), HasSubstr("rank 0 calls"));
      }
    };
    auto other = at::zeros({99});
    fails([&] { group.all_reduce(rank == 1 ? other : kept); },
          "rank 1 calls all_reduce #1 of 99 Float");
    auto integers = pattern(100, rank, at::kLong);
    fails([&] { group.all_reduce(rank == 1 ? integers : kept); },
          "rank 1 calls all_reduce #2 of 100 Long");
    fails(
        [&] {
          if (rank == 1) group.broadcast(kept, 0);
          else group.all_reduce(kept);
        },
        "rank 1 calls broadcast #3");
    fails([&] { group.broadcast(kept, rank == 1 ? 1 : 0); }, "with root 1");
    fails(
        [&] {
          if (rank == 1) group.barrier();
          else group.all_reduce(kept);
        },
        "rank 1 calls barrier");
    fails([&] { group.all_reduce(kept, rank == 1 ? 0.5 : 1); }, "of 100 Float (scale 0.5)");
    // Without purposes, two sums in another order are not noticed: their tensors are alike.
    const auto sum = [&](const char* purpose) { group.all_reduce(kept, 1, purpose); };
    fails([&] { sum(rank == 1 ? "losses" : "norms"); }, "of 100 Float (losses)");
    fails([&] { group.reduce(kept, 0, rank == 1 ? "losses" : "norms"); }, "(losses)");
    fails([&] { group.broadcast(kept, 0, rank == 1 ? "losses" : "norms"); }, "(losses)");
    const std::vector<int64_t> each(world(), 1);
    auto sent = at::zeros({world()}), received = at::zeros({world()});
    fails([&] { group.all_to_all(received, sent, each, each, rank == 1 ? "losses" : "norms"); },
          "(all_gather_bytes, losses)");
    fails(
        [&] {
          if (rank == 1) group.all_gather_bytes("text");
          else group.broadcast_bytes("text", 0);
        },
        "(all_gather_bytes)");
    fails(
        [&] {
          if (rank == 1) group.gather_bytes("text", 0);
          else group.broadcast_bytes("text", 0);
        },
        "(gather_bytes)");
    std::vector<int64_t> counts(world(), 0);
    counts[rank == 1 ? 1 : 0] = 100;
    fails([&] { group.all_gather(kept, counts); }, "other counts");
    EXPECT_TRUE(at::equal(kept, pattern(100, rank)));
    group.all_reduce(kept);  // still in step
    EXPECT_TRUE(at::equal(kept, sum_of_patterns(100, world())));
  });
}

TEST_P(SeveralRanks, ContractNamesTheFirstDifference) {
  each_rank([&](ProcessGroup group, int rank) {
    group.reset_stats();
    group.check_contract("Thing", {"a", "b"});
    EXPECT_EQ(group.stats().bytes.calls, 1u);
    EXPECT_EQ(group.stats().bytes.bytes_sent, 0u) << "a digest is part of the header";
    EXPECT_EQ(group.stats().bytes.bytes_received, 0u);
    try {
      group.check_contract("Thing", rank == 1 ? std::vector<std::string>{"a", "c", "d"}
                                              : std::vector<std::string>{"a", "b"});
      ADD_FAILURE();
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("Thing: the ranks differ: entry 1 is"));
      EXPECT_THAT(error.what(), HasSubstr("'c'"));
      EXPECT_THAT(error.what(), HasSubstr("'b'"));
    }
    EXPECT_GT(group.stats().bytes.bytes_sent, 0u) << "differing entries travel";
    EXPECT_THROW(group.check_contract(rank == 0 ? "Thing" : "Other", {"a"}), UsageError);
  });
}

TEST_P(Collectives, BadArgumentsNameRankAndExpectation) {
  each_rank([&](ProcessGroup group, int rank) {
    EXPECT_THROW(group.all_reduce(at::Tensor()), UsageError);
    EXPECT_THROW(group.all_reduce(at::zeros({2}, at::kBool)), UsageError);
    EXPECT_THROW(group.broadcast(at::zeros({2}), world()), UsageError);
    EXPECT_THROW(group.all_gather(at::zeros({4}), std::vector<int64_t>(world(), 3)), UsageError);
    EXPECT_THROW(group.set_timeout(std::chrono::milliseconds(0)), UsageError);
    const std::vector<int64_t> one(world(), 1);
    const auto ints = at::ones({world()}, at::kLong), flat = at::ones({world()});
    const auto consume = [](int64_t, const at::Tensor&) {};
    EXPECT_THROW(group.all_reduce(ints, 0.5), UsageError);
    EXPECT_THROW(group.reduce_scatter_each(ints, one, consume, 0.5), UsageError);
    EXPECT_THROW(group.reduce_scatter_into_async(ints, one, ints.narrow(0, 0, 1).clone(), 0.5),
                 UsageError);
    EXPECT_THROW(group.reduce_scatter_into_async(flat, one, flat.narrow(0, 0, 1)), UsageError);
    EXPECT_THROW(group.all_to_all(flat, flat, one, one), UsageError);
    EXPECT_THROW(group.broadcast(at::quantize_per_tensor(flat, 0.5, 0, at::kQInt8), 0), UsageError);
    const std::vector<int64_t> three(world(), 3);
    EXPECT_THROW(group.all_to_all(at::zeros({3 * world()}), flat, three, one), UsageError);
    group.barrier();
  });
}

TEST_P(Collectives, ExpandedTensorsAreSummedOnce) {
  each_rank([&](ProcessGroup group, int rank) {
    const auto value = pattern(1, rank);
    group.all_reduce(value.expand({4}));
    EXPECT_TRUE(at::equal(value, sum_of_patterns(1, world())));
    const auto row = pattern(3, rank);
    group.reduce(row.expand({2, 3}), 0);
    EXPECT_TRUE(at::equal(row, rank == 0 ? sum_of_patterns(3, world()) : pattern(3, rank)));
  });
}

TEST_P(SeveralRanks, ARankThatLeavesIsNamedByAll) {
  const auto start = std::chrono::steady_clock::now();
  auto limited = options();
  // MPI does not tell who has left.
  if (limited.backend == Backend::MPI) limited.timeout = std::chrono::seconds(1);
  const auto errors = run_ranks_catching(
      world(),
      [&](ProcessGroup group, int rank) {
        group.barrier();
        if (rank == world() - 1) throw std::runtime_error("my own trouble");
        auto tensor = pattern(100, rank);
        while (true) group.all_reduce(tensor);
      },
      limited);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  for (int r = 0; r + 1 < world(); ++r) {
    try {
      ASSERT_TRUE(errors[r]);
      std::rethrow_exception(errors[r]);
    } catch (const BrokenWorldError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{world() - 1}) << error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

TEST_P(SeveralRanks, ALateRankIsNamedAtTheTimeOut) {
  std::atomic<int> gave_up{0};
  const auto errors = run_ranks_catching(
      world(),
      [&](ProcessGroup group, int rank) {
        group.barrier();
        group.set_timeout(std::chrono::milliseconds(
            600));  // only now: the rendezvous may take long on a busy machine
        if (rank == 0) {
          for (int i = 0; i < 1000 && gave_up < world() - 1; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        struct Count {
          std::atomic<int>& n;
          ~Count() { ++n; }
        } count{gave_up};
        group.all_reduce(at::ones({3}));
      },
      options());
  for (int r = 1; r < world(); ++r)
    EXPECT_THAT(message_of(errors[r]), HasSubstr("rank 0 did not arrive within 600 ms"));
}

TEST(FromC10d, AGlooBackendOfTheCallerWorks) {
  EXPECT_THROW(tessera::from_c10d({}), UsageError);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(20));
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
      auto group =
          tessera::from_c10d(c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, 2, options));
      EXPECT_EQ(group.rank(), rank);
      auto tensor = pattern(100000, rank);
      group.all_reduce(tensor);
      EXPECT_TRUE(at::equal(tensor, sum_of_patterns(100000, 2)));
      EXPECT_THROW(group.split(0), UsageError);
      EXPECT_THROW(group.duplicate(), UsageError);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(InitProcessGroup, NcclWithoutABuildOrDeviceIsAnError) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup, int) {}, {.backend = Backend::NCCL});
  EXPECT_THAT(message_of(errors[0]), HasSubstr("backend NCCL: "));
  EXPECT_THAT(message_of(errors[0]),
              AnyOf(HasSubstr("TESSERA_WITH_NCCL"), HasSubstr("rank 0 of 2 sees no CUDA device")));
}

const auto kName = [](const auto& tested) { return "World" + std::to_string(tested.param.world); };
INSTANTIATE_TEST_SUITE_P(Self, Collectives, ::testing::Values(Setting{1, Backend::Auto}), kName);
const auto kGloo = ::testing::Values(Setting{2, Backend::Gloo}, Setting{3, Backend::Gloo},
                                     Setting{4, Backend::Gloo});
const auto kTcp =
    ::testing::Values(Setting{2, Backend::TCP}, Setting{3, Backend::TCP}, Setting{4, Backend::TCP});
const auto kMpi = ::testing::Values(Setting{3, Backend::MPI}, Setting{4, Backend::MPI});
const auto kShared =
    ::testing::Values(Setting{2, Backend::SharedMemory}, Setting{3, Backend::SharedMemory},
                      Setting{4, Backend::SharedMemory});
const auto kCheckedGloo = ::testing::Values(Setting{3, Backend::Gloo, true});
const auto kCheckedTcp = ::testing::Values(Setting{3, Backend::TCP, true});
const auto kCheckedShared = ::testing::Values(Setting{2, Backend::SharedMemory, true},
                                              Setting{3, Backend::SharedMemory, true});
INSTANTIATE_TEST_SUITE_P(CheckedGloo, Collectives, kCheckedGloo, kName);
INSTANTIATE_TEST_SUITE_P(CheckedGloo, SeveralRanks, kCheckedGloo, kName);
INSTANTIATE_TEST_SUITE_P(CheckedTcp, Collectives, kCheckedTcp, kName);
INSTANTIATE_TEST_SUITE_P(CheckedTcp, SeveralRanks, kCheckedTcp, kName);
INSTANTIATE_TEST_SUITE_P(CheckedShared, Collectives, kCheckedShared, kName);
INSTANTIATE_TEST_SUITE_P(CheckedShared, SeveralRanks, kCheckedShared, kName);
INSTANTIATE_TEST_SUITE_P(Gloo, Collectives, kGloo, kName);
INSTANTIATE_TEST_SUITE_P(Tcp, Collectives, kTcp, kName);
INSTANTIATE_TEST_SUITE_P(Tcp, SeveralRanks, kTcp, kName);
INSTANTIATE_TEST_SUITE_P(Mpi, Collectives, kMpi, kName);
INSTANTIATE_TEST_SUITE_P(Mpi, SeveralRanks, kMpi, kName);
INSTANTIATE_TEST_SUITE_P(SharedMemory, Collectives, kShared, kName);
INSTANTIATE_TEST_SUITE_P(Gloo, SeveralRanks, kGloo, kName);
INSTANTIATE_TEST_SUITE_P(SharedMemory, SeveralRanks, kShared, kName);

}  // namespace
