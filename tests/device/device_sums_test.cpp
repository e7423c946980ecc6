// Sums by the device's backend, and in the order of the CPU's.
#include <cmath>
#include <numeric>

#include <gmock/gmock.h>

#include "device/expect_success.h"
#include "device/loss.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

namespace tessera::on_device {
namespace {

/// The results of each kind of sum: means, sums, and a factor of neither; segments of equal
/// lengths, of unequal ones, and without elements.
std::vector<at::Tensor> sums(ProcessGroup& group, at::Device where, at::ScalarType dtype) {
  const int rank = group.rank(), size = group.size();
  const int64_t numel = 4 * size + 1;
  const auto input = [&](int64_t n) {
    const auto i = torch::arange(n, at::kDouble);
    return ((i * 0.7 + rank * 1.3).sin() * 100).to(dtype).to(where);
  };
  const bool exact = !at::isFloatingType(dtype);
  std::vector<at::Tensor> all;
  for (const double scale : {1.0, 1.0 / size, 0.3}) {
    if (exact && scale != 1) continue;
    const auto reduced = all.emplace_back(input(numel));
    group.all_reduce(reduced, scale);
    std::vector<int64_t> uneven(size, 2);
    uneven[0] = numel - 2 * (size - 1);
    std::vector<int64_t> gaps(size, 0);
    gaps[size - 1] = numel;
    for (const auto& counts : {std::vector<int64_t>(size, 3), uneven, gaps}) {
      const auto total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
      const auto begin = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
      const auto before = input(total);
      // Both in one allocation, as buckets and segments may be.
      const auto memory = at::empty({total + counts[rank]}, before.options());
      const auto flat = memory.narrow(0, 0, total), into = memory.narrow(0, total, counts[rank]);
      flat.copy_(before);
      if (scale == 1) group.reduce_scatter(flat, counts);
      all.push_back(flat.narrow(0, begin, counts[rank]).clone());
      flat.copy_(before);
      group.reduce_scatter_into_async(flat, counts, into, scale).wait();
      expect(flat.cpu().equal(before.cpu()), "the input as it was");
      all.push_back(into.clone());
      into.zero_();
      group.reduce_scatter_each(
          flat, counts,
          [&](int64_t offset, const at::Tensor& run) {
            into.narrow(0, offset, run.numel()).copy_(run);
          },
          scale);
      all.push_back(into.clone());
      expect(flat.narrow(0, begin, counts[rank])
                 .cpu()
                 .equal(before.narrow(0, begin, counts[rank]).cpu()),
             "the own segment as it was, for a consumer");
    }
  }
  const auto reduced = input(numel);
  group.reduce(reduced, size - 1);
  if (rank == size - 1) all.push_back(reduced);
  for (auto& tensor : all) tensor = tensor.cpu();
  return all;
}

double tolerance_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? 2e-3 : dtype == at::kBFloat16 ? 2e-2 : dtype == at::kFloat ? 1e-6 : 0;
}

TEST(DeviceSums, TheBackendsAreThoseOfTheCpuButForRounding) {
  for (const int world : {2, 3, 4}) {
    if (world > most_ranks()) continue;
    expect_success(
        world,
        [](Groups& groups) {
          auto cpu = groups.cpu(), native = groups.native();
          for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
            const auto expected = sums(cpu, at::kCPU, dtype);
            const auto got = sums(native, device(), dtype);
            expect(got.size() == expected.size(), "as many results");
            for (size_t i = 0; i < got.size(); ++i) {
              const double tolerance = dtype == at::kDouble ? 1e-13 : tolerance_of(dtype);
              expect(got[i].allclose(expected[i], tolerance, 200 * tolerance),
                     "result " + std::to_string(i) + " of " + c10::toString(dtype));
            }
          }
          const auto calls = [](const CommStats& stats) {
            return std::vector<uint64_t>{stats.calls(), stats.payload_sent(),
                                         stats.payload_received()};
          };
          expect(calls(native.stats()) == calls(cpu.stats()), "the calls and bytes of the CPU");
        },
        2);
  }
}

TEST(DeviceSums, DeterministicOnesHaveTheBitsOfTheCpu) {
  for (const int world : {2, 3, 4}) {
    if (world > most_ranks()) continue;
    expect_success(
        world,
        [](Groups& groups) {
          ProcessGroupOptions options;
          options.deterministic = true;
          auto cpu = groups.cpu(), there = groups.native(options);
          for (const auto dtype : {at::kFloat, at::kHalf, at::kLong}) {
            const auto expected = sums(cpu, at::kCPU, dtype);
            const auto got = sums(there, device(), dtype);
            for (size_t i = 0; i < got.size(); ++i)
              expect(got[i].equal(expected[i]), "result " + std::to_string(i));
          }
          auto child = there.split(0);
          const auto x = torch::rand({100}, at::TensorOptions(device()));
          auto y = x.clone();
          there.all_reduce(x);
          child->all_reduce(y);
          expect(x.cpu().equal(y.cpu()), "the bits of a sub-group of the same ranks");
        },
        2);
  }
}

/// A mean is in range where all values are; their sum is not.
TEST(DeviceSums, TheBackendsMeansOf16BitsAreInRange) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.native();
    const double third = 1.0 / 3;
    for (const double scale : {0.5, third}) {
      for (const bool equal : {true, false}) {
        auto values = torch::full({5}, 48000, at::TensorOptions(at::kHalf).device(device()));
        group.all_reduce(values, scale);
        expect(values.isfinite().all().item<bool>(), "a finite mean");
        const std::vector<int64_t> counts{equal ? 2 : 1, equal ? 2 : 3};
        auto parts = torch::full({4}, 48000, at::TensorOptions(at::kHalf).device(device()));
        auto own = at::empty({counts[groups.rank()]}, parts.options());
        group.reduce_scatter_into_async(parts, counts, own, scale).wait();
        const auto expected = 96000 * scale;
        const auto error = (own.to(at::kFloat) - expected).abs().max().item<double>();
        expect(error < expected * 2e-3,
               "the mean of a segment, not off by " + std::to_string(error));
      }
    }
  });
}

TEST(DeviceSums, RanksThatDisagreeAboutTheOrderGetAnError) {
  const auto errors = run_processes(3, 1, [](Groups& groups) {
    ProcessGroupOptions options;
    options.deterministic = groups.rank() == 1;
    auto group = groups.native(options);
    group.all_reduce(torch::ones({4}, device()));
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(errors[rank],
                ::testing::HasSubstr("ProcessGroup: deterministic is false on rank 0 and true on "
                                     "rank 1; expected the same on every rank (seen on rank " +
                                     std::to_string(rank)));
  }
}

}  // namespace
}  // namespace tessera::on_device
