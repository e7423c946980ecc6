#pragma once

#include <numeric>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "tessera/process_group.h"

namespace tessera::testing {

/// Values of 16 bits that are in range for float16, and whose sum over two ranks is not.
inline at::Tensor large_values(int64_t n, int rank, at::ScalarType dtype) {
  return (((at::arange(n, at::kLong) * 7 + rank * 13) % 300 + 950) * 32).to(dtype);
}

/// Takes means of large 16-bit values in every way. Returns the first that is not the float sum
/// times 1/W, rounded once; "" if there is none. Collective.
inline std::string first_wrong_mean(ProcessGroup& group, at::Device where = at::kCPU) {
  const int size = group.size(), rank = group.rank();
  const double scale = 1.0 / size;
  std::string wrong;
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    for (const int64_t n : {5, 3001, 70001}) {
      auto sum = at::zeros({n}, at::kFloat);  // exact: multiples of 32 below 2^24
      for (int r = 0; r < size; ++r) sum += large_values(n, r, dtype).to(at::kFloat);
      const auto mean = sum.mul(scale).to(dtype);
      std::vector<int64_t> counts(size, n / size);
      counts.back() += n % size;
      const auto begin = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
      const auto own = mean.narrow(0, begin, counts[rank]);
      const auto check = [&](const char* what, const at::Tensor& got, const at::Tensor& expected) {
        if (wrong.empty() && !at::equal(got.cpu(), expected))
          wrong = fmt::format("{} of {} {}: {}", what, n, c10::toString(dtype),
                              (got.cpu().to(at::kFloat) - expected).abs().max().item<float>());
      };
      for (const bool shared : {false, true}) {
        if (shared && !where.is_cpu()) continue;
        auto values = large_values(n, rank, dtype).to(where);
        if (shared) values = group.allocate(n, values.options()).copy_(values);
        auto part = at::empty({counts[rank]}, values.options());
        group.reduce_scatter_each(
            values, counts,
            [&](int64_t offset, const at::Tensor& run) {
              part.narrow(0, offset, run.numel()).copy_(run);
            },
            scale);
        check("reduce_scatter_each", part, own);
        group.reduce_scatter_into_async(values, counts, part.zero_(), scale).wait();
        check("reduce_scatter_into", part, own);
        group.all_reduce(values, scale);
        check("all_reduce", values, mean);
      }
    }
  }
  return wrong;
}

}  // namespace tessera::testing
