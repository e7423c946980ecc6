#include <numeric>

#include <ATen/CPUGeneratorImpl.h>

#include "shm_worlds.h"

namespace {

using namespace tessera::testing;
using tessera::comm::Transport;

enum class Ranks { threads, processes };
/// The memory of the tensors: shared on all ranks, on none, or on all but rank 0.
enum class Memory { shared, own, mixed };

struct Setting {
  int size;
  Ranks ranks;
};

void run_ranks(const Setting& setting, const TransportBody& body) {
  if (setting.ranks == Ranks::processes) return Processes(setting.size, body).expect_all_succeed();
  for (const auto& error : run_threads(setting.size, body))
    if (error) std::rethrow_exception(error);
}

bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

/// Rank r's values, chosen so that sums in another order or another precision differ.
at::Tensor values(int64_t n, int r, at::ScalarType dtype) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + r);
  if (at::isIntegralType(dtype, true))
    return at::randint(0, dtype == at::kBool ? 2 : 100, {n}, generator).to(dtype);
  return (at::rand({n}, generator) - 0.5).mul(std::pow(10.0, r % 3)).to(dtype);
}

/// The sum over ranks [first, end) by a tree over aligned blocks: the left part has the largest
/// power of two of ranks that is less than their number.
at::Tensor tree_sum(int64_t n, int first, int end, at::ScalarType dtype) {
  if (end - first == 1) return values(n, first, dtype).to(is_half(dtype) ? at::kFloat : dtype);
  int left = 1;
  while (2 * left < end - first) left *= 2;
  return tree_sum(n, first, first + left, dtype) + tree_sum(n, first + left, end, dtype);
}

at::Tensor expected_sum(int64_t n, int size, at::ScalarType dtype) {
  return tree_sum(n, 0, size, dtype).to(dtype);
}

/// Makes tensors in the given kind of memory. A shared tensor begins some elements after the start
/// of its allocation.
struct Maker {
  Transport& transport;
  int rank;
  Memory memory;

  at::Tensor operator()(const at::Tensor& content) const {
    if (memory == Memory::own) return content.clone();
    auto whole = transport.allocate(content.numel() + 16, content.options(), false);
    if (memory == Memory::mixed && rank == 0) return content.clone();
    auto part = whole.narrow(0, 16, content.numel());
    part.copy_(content);
    return part;
  }
};

std::vector<int64_t> sizes_for(int size) { return {0, 1, 7, size - 1, 4099, 400001}; }

class ShmCollectives : public ::testing::TestWithParam<Setting> {
 protected:
  void each_memory(const std::function<void(const Maker& make, int rank, int size)>& body) {
    const int size = GetParam().size;
    run_ranks(GetParam(), [&](Transport& transport, int rank) {
      for (auto memory : {Memory::shared, Memory::own, Memory::mixed})
        body(Maker{transport, rank, memory}, rank, size);
    });
  }
};

const auto sum_dtypes = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                         at::kLong,  at::kInt,    at::kByte};
const auto moved_dtypes = {at::kFloat, at::kLong, at::kByte, at::kBool, at::kBFloat16};

TEST_P(ShmCollectives, AllReduceIsBitExactInTheOrderOfTheTree) {
  each_memory([](const Maker& make, int rank, int size) {
    for (auto dtype : sum_dtypes) {
      for (auto n : sizes_for(size)) {
        if (n > 5000 && dtype != at::kFloat) continue;
        auto tensor = make(values(n, rank, dtype));
        make.transport.all_reduce(tensor, 1);
        ASSERT_TRUE(at::equal(tensor, expected_sum(n, size, dtype)))
            << n << " " << c10::toString(dtype);
        if (at::isIntegralType(dtype, true)) continue;
        auto mean = make(values(n, rank, dtype));
        make.transport.all_reduce(mean, 1.0 / size);
        ASSERT_TRUE(at::equal(mean, tree_sum(n, 0, size, dtype).mul(1.0 / size).to(dtype)))
            << n << " " << c10::toString(dtype);
      }
    }
  });
}

TEST_P(ShmCollectives, ReduceAndBroadcastWithEveryRoot) {
  each_memory([](const Maker& make, int rank, int size) {
    for (int root = 0; root < size; ++root) {
      for (auto n : sizes_for(size)) {
        auto sum = make(values(n, rank, at::kFloat));
        make.transport.reduce(sum, root);
        ASSERT_TRUE(at::equal(
            sum, rank == root ? expected_sum(n, size, at::kFloat) : values(n, rank, at::kFloat)))
            << n;
      }
      for (auto dtype : moved_dtypes) {
        for (auto n : sizes_for(size)) {
          if (n > 5000 && dtype != at::kFloat) continue;
          auto copy = make(values(n, rank, dtype));
          make.transport.broadcast(copy, root);
          ASSERT_TRUE(at::equal(copy, values(n, root, dtype))) << n << " " << c10::toString(dtype);
        }
      }
    }
  });
}

struct Segments {
  std::vector<int64_t> counts, starts;
  int64_t total = 0;

  /// Uneven counts, some of them 0.
  Segments(int64_t scale, int size) {
    for (int r = 0; r < size; ++r) {
      starts.push_back(total);
      counts.push_back(scale * ((r + 1) % 3) + (r == 1 ? scale / 3 : 0));
      total += counts.back();
    }
  }
  at::Tensor of(const at::Tensor& flat, int r) const {
    return flat.narrow(0, starts[r], counts[r]);
  }
};

TEST_P(ShmCollectives, AllGatherOfUnevenSegments) {
  each_memory([](const Maker& make, int rank, int size) {
    for (auto dtype : moved_dtypes) {
      for (int64_t scale : {0, 1, 5, 4099, 300001}) {
        if (scale > 5000 && dtype != at::kFloat) continue;
        const Segments segments(scale, size);
        const auto expected = values(segments.total, 9, dtype);
        auto flat = at::zeros_like(expected);
        segments.of(flat, rank).copy_(segments.of(expected, rank));
        flat = make(flat);
        make.transport.all_gather(flat, segments.counts);
        ASSERT_TRUE(at::equal(flat, expected)) << scale << " " << c10::toString(dtype);
      }
    }
  });
}

TEST_P(ShmCollectives, ReduceScatterOfUnevenSegments) {
  each_memory([](const Maker& make, int rank, int size) {
    for (auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      for (int64_t scale : {0, 1, 5, 4099, 300001}) {
        if (scale > 5000 && dtype != at::kFloat) continue;
        const Segments segments(scale, size);
        const auto mine = values(segments.total, rank, dtype);
        const auto expected = segments.of(expected_sum(segments.total, size, dtype), rank);

        auto flat = make(mine);
        auto seen = at::zeros_like(expected);
        int64_t next = 0;
        const Transport::ConsumeRun consume = [&](int64_t offset, const at::Tensor& run) {
          ASSERT_EQ(offset, next) << "ascending, without gaps";
          ASSERT_EQ(run.scalar_type(), dtype);
          seen.narrow(0, offset, run.numel()).copy_(run);
          next += run.numel();
        };
        make.transport.reduce_scatter(flat, segments.counts, {1, &consume});
        ASSERT_EQ(next, segments.counts[rank]);
        ASSERT_TRUE(at::equal(seen, expected)) << scale << " " << c10::toString(dtype);
        ASSERT_TRUE(at::equal(flat, mine)) << "left as it was";

        make.transport.reduce_scatter(flat, segments.counts, {});
        ASSERT_TRUE(at::equal(segments.of(flat, rank), expected))
            << scale << " " << c10::toString(dtype);
      }
    }
  });
}

TEST_P(ShmCollectives, AllToAllOfUnevenParts) {
  each_memory([](const Maker& make, int rank, int size) {
    for (int64_t scale : {0, 1, 4099, 300001}) {
      // Rank a sends count(a, b) times the value 10 a + b to rank b.
      const auto count = [&](int a, int b) { return scale * ((a + 2 * b) % 3); };
      std::vector<int64_t> send, receive;
      std::vector<at::Tensor> sent{at::empty({0}, at::kInt)}, expected{at::empty({0}, at::kInt)};
      for (int r = 0; r < size; ++r) {
        send.push_back(count(rank, r));
        receive.push_back(count(r, rank));
        sent.push_back(at::full({send.back()}, 10 * rank + r, at::kInt));
        expected.push_back(at::full({receive.back()}, 10 * r + rank, at::kInt));
      }
      auto output = at::zeros_like(at::cat(expected));
      make.transport.all_to_all(output, at::cat(sent), receive, send);
      ASSERT_TRUE(at::equal(output, at::cat(expected))) << scale;
    }
  });
}

TEST_P(ShmCollectives, HeadersAreExchangedAndPeersMemoryIsVisible) {
  run_ranks(GetParam(), [&](Transport& transport, int rank) {
    const int size = GetParam().size;
    for (uint64_t i = 1; i <= 50; ++i) {
      tessera::comm::OpHeader header;
      header.sequence = i;
      header.numel = 100 * rank;
      const auto all = transport.exchange(header);
      ASSERT_EQ(all.size(), static_cast<size_t>(size));
      for (int r = 0; r < size; ++r) {
        ASSERT_EQ(all[r].sequence, i);
        ASSERT_EQ(all[r].numel, 100 * r);
      }
    }
    auto whole = transport.allocate(3000, at::kDouble, false);
    EXPECT_EQ(whole.sum().item<double>(), 0);
    whole.fill_(rank);
    transport.exchange({});
    for (int peer = 0; peer < size; ++peer) {
      auto view = transport.peer_view(whole.narrow(0, 1000, 500), peer);
      ASSERT_TRUE(view.defined());
      ASSERT_TRUE(at::equal(view, at::full({500}, peer, at::kDouble)));
    }
    EXPECT_FALSE(transport.peer_view(at::zeros({5}), 0).defined());
    auto kept = transport.peer_view(whole, (rank + 1) % size);
    transport.exchange({});
    whole.reset();
    EXPECT_EQ(kept[2999].item<double>(), (rank + 1) % size) << "a view keeps the memory";
    transport.exchange({});
  });
}

TEST_P(ShmCollectives, ATensorMayBeOverwrittenAfterReturn) {
  // One rank only provides data and so could return first. It overwrites its tensor on return,
  // which the others must not read any more.
  constexpr int64_t n = 1 << 18;
  each_memory([](const Maker& make, int rank, int size) {
    for (int first = 0; first < size; ++first) {
      std::vector<int64_t> counts(size, 0), all_but(size, n / size);
      counts[first] = n;
      all_but[first] = 0;
      const auto expected = values(n, 9, at::kFloat);

      auto gathered = make(rank == first ? expected : at::zeros_like(expected));
      make.transport.all_gather(gathered, counts);
      if (rank == first) gathered.fill_(-1);
      else ASSERT_TRUE(at::equal(gathered, expected)) << "all_gather";

      auto sent = make(rank == first ? expected : at::zeros_like(expected));
      make.transport.broadcast(sent, first);
      if (rank == first) sent.fill_(-1);
      else ASSERT_TRUE(at::equal(sent, expected)) << "broadcast";

      const int64_t total = std::accumulate(all_but.begin(), all_but.end(), int64_t{0});
      const int64_t before = std::accumulate(all_but.begin(), all_but.begin() + rank, int64_t{0});
      auto parts = make(values(total, rank, at::kFloat));
      make.transport.reduce_scatter(parts, all_but, {});
      if (rank == first) parts.fill_(-1);
      else
        ASSERT_TRUE(
            at::equal(parts.narrow(0, before, all_but[rank]),
                      expected_sum(total, size, at::kFloat).narrow(0, before, all_but[rank])))
            << "reduce_scatter";

      auto summed = make(values(n, rank, at::kFloat));
      make.transport.all_reduce(summed, 1);
      if (rank == first) summed.fill_(-1);
      else ASSERT_TRUE(at::equal(summed, expected_sum(n, size, at::kFloat))) << "all_reduce";
      make.transport.exchange({});
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmCollectives,
                         ::testing::Values(Setting{2, Ranks::threads}, Setting{3, Ranks::threads},
                                           Setting{4, Ranks::threads}, Setting{2, Ranks::processes},
                                           Setting{4, Ranks::processes}),
                         [](const auto& tested) {
                           return std::to_string(tested.param.size) +
                                  (tested.param.ranks == Ranks::threads ? "Threads" : "Processes");
                         });

}  // namespace
