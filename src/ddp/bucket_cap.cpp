#include "ddp/bucket_cap.h"

#include <algorithm>
#include <chrono>

#include <torch/types.h>

namespace tessera {
namespace {

constexpr double kLatencyShare = 1.0 / 16;
constexpr int64_t kSmall = 256;        // values
constexpr int64_t kLargest = 2 << 20;  // values: 8 MiB
constexpr double kLongEnough = 0.02;   // seconds; a shorter probe says little about bandwidth
constexpr const char* kTag = "probe of the latency and bandwidth between hosts";

/// Seconds of an all-reduce of `numel` floats as rank 0 sees it. The same on every rank.
double time_all_reduce(ProcessGroup& group, int64_t numel, int tries) {
  const auto options = at::TensorOptions().device(group.control_device());
  auto values = at::zeros({numel}, options);
  double best = 1e9;
  for (int i = 0; i < tries; ++i) {
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(values, 1, kTag);
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  auto result = at::full({1}, best, options.dtype(at::kDouble));
  group.broadcast(result, 0);
  return result.item<double>();
}

}  // namespace

double bucket_mib_for(double latency, double bandwidth) {
  const double wanted = latency / kLatencyShare * bandwidth / (1 << 20);
  for (double mib = 1; mib <= 16; mib *= 2)
    if (mib >= wanted) return mib;
  return kDefaultBucketMib;
}

double choose_bucket_mib(ProcessGroup& group) {
  if (group.same_host()) return kDefaultBucketMib;
  const double latency = time_all_reduce(group, kSmall, 5);
  double bandwidth = 0;
  for (int64_t numel = 1 << 15; numel <= kLargest; numel *= 4) {
    const double seconds = time_all_reduce(group, numel, 1);
    bandwidth = 4.0 * static_cast<double>(numel) / std::max(seconds - latency, 1e-6);
    if (seconds > kLongEnough) break;
  }
  return bucket_mib_for(latency, bandwidth);
}

}  // namespace tessera
