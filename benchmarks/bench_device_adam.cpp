// Adam over one flat bucket on a CUDA device, beside a copy of the device's memory.
//
//   bench_device_adam [ELEMENTS [ROUNDS]]
//
// Default: 100000000 elements, 9 rounds. Every round times each candidate once, in turn. Prints the
// median time, and the bytes that it moves a second: 28 an element for Adam, which reads four
// values and writes three, and 8 for a copy.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include "tessera/optim/fused_optimizer.h"

namespace {

struct Candidate {
  const char* name;
  double bytes_an_element;
  std::function<void()> run;
  std::vector<double> ms = {};
};

void time_once(Candidate& candidate) {
  constexpr int kRuns = 10;
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  candidate.run();
  guard.synchronizeDevice(0);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) candidate.run();
  guard.synchronizeDevice(0);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  candidate.ms.push_back(took.count() / kRuns);
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

at::Tensor parameter(int64_t n) {
  auto result = torch::randn({n}, at::kCUDA).requires_grad_();
  result.mutable_grad() = torch::randn({n}, at::kCUDA);
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : 100'000'000;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  if (!at::globalContext().hasCUDA() || n < 1 || rounds < 1) {
    fmt::print(stderr, "bench_device_adam: expected a CUDA device, and counts of at least 1\n");
    return 1;
  }
  auto to = torch::empty({n}, at::kCUDA);
  const auto from = torch::randn({n}, at::kCUDA);
  tessera::FusedAdam ours(std::vector<at::Tensor>{parameter(n)});
  torch::optim::Adam plain(std::vector<at::Tensor>{parameter(n)});
  std::vector<Candidate> all{{"copy on the device", 8, [&] { to.copy_(from); }},
                             {"tessera::FusedAdam", 28, [&] { ours.step(); }},
                             {"torch::optim::Adam", 28, [&] { plain.step(); }}};
  for (int round = 0; round < rounds; ++round)
    for (auto& candidate : all) time_once(candidate);
  for (const auto& candidate : all) {
    const double ms = median(candidate.ms);
    fmt::print("{:<20} {:8.3f} ms {:8.0f} GB/s\n", candidate.name, ms,
               1e-6 * candidate.bytes_an_element * static_cast<double>(n) / ms);
  }
}
