#include "train/hooks/histogram.h"

#include <algorithm>
#include <limits>
#include <map>

namespace tessera::train {
namespace {

const at::Tensor& limits() {
  static const at::Tensor kLimits = [] {
    std::vector<double> values{0};
    for (double value = 1e-12; value < 1e20; value *= 1.1) {
      values.push_back(value);
      values.push_back(-value);
    }
    std::sort(values.begin(), values.end());
    values.push_back(std::numeric_limits<double>::max());
    return at::tensor(values, at::kDouble);
  }();
  return kLimits;
}

// A row of one parameter: the counts, then count, sum and sum of squares.
enum Extra : int64_t { kCount, kSum, kSquares, kExtras };

/// Adds the elements of a shard to `row`, and to `bounds`: minus the smallest, and the largest.
void add(const at::Tensor& shard, at::Tensor row, at::Tensor bounds) {
  at::Tensor values = shard.detach().reshape({-1}).to(at::kCPU, at::kDouble);
  values = values.masked_select(values.isfinite());
  if (values.numel() == 0) return;
  const int64_t buckets = limits().numel();
  row.narrow(0, 0, buckets) += at::bincount(at::bucketize(values, limits()), {}, buckets);
  at::Tensor extra = row.narrow(0, buckets, kExtras);
  extra[kCount] += static_cast<double>(values.numel());
  extra[kSum] += values.sum();
  extra[kSquares] += (values * values).sum();
  bounds.copy_(at::maximum(bounds, at::stack({-values.min(), values.max()})));
}

Histogram histogram_of(const at::Tensor& row, const at::Tensor& bounds) {
  const int64_t buckets = limits().numel();
  const double* counts = row.data_ptr<double>();
  Histogram result;
  result.count = counts[buckets + kCount];
  result.sum = counts[buckets + kSum];
  result.sum_of_squares = counts[buckets + kSquares];
  if (result.count > 0) {
    result.min = -bounds.data_ptr<double>()[0];
    result.max = bounds.data_ptr<double>()[1];
  }
  // Only the buckets from the first to the last nonempty one, and the limit before them.
  int64_t first = 0, last = buckets - 1;
  while (first < last && counts[first] == 0) ++first;
  while (last > first && counts[last] == 0) --last;
  if (first > 0) --first;
  const double* limit = limits().data_ptr<double>();
  result.limits.assign(limit + first, limit + last + 1);
  result.counts.assign(counts + first, counts + last + 1);
  return result;
}

}  // namespace

std::vector<std::pair<std::string, Histogram>> parameter_histograms(ModelWrapper& model) {
  const torch::NoGradGuard no_grad;
  const std::vector<ParameterShard> shards = model.shards();
  // Ranks may own shards of other parameters: names and their order come from the module.
  std::map<std::string, int64_t> rows;
  std::vector<std::string> names;
  for (const auto& parameter : model.model().module->named_parameters(true)) {
    rows.emplace(parameter.key(), static_cast<int64_t>(names.size()));
    names.push_back(parameter.key());
  }
  const auto count = static_cast<int64_t>(names.size());
  ProcessGroup group = model.group();
  const at::Tensor sums = at::zeros({count, limits().numel() + kExtras}, at::kDouble);
  const at::Tensor bounds =
      at::full({count, 2}, -std::numeric_limits<double>::infinity(), at::kDouble);
  for (const size_t i : model.saved_shards()) {
    const auto found = rows.find(shards[i].parameter);
    if (found != rows.end()) add(shards[i].tensor, sums[found->second], bounds[found->second]);
  }
  const at::Tensor total = sums.to(group.control_device());
  group.all_reduce(total, 1, "histograms of the parameters");
  const at::Tensor all = group.all_gather(bounds.reshape({-1}).to(group.control_device()))
                             .cpu()
                             .reshape({group.size(), count, 2});
  if (group.rank() != 0) return {};
  const at::Tensor host = total.cpu(), extremes = std::get<0>(all.max(0)).contiguous();
  std::vector<std::pair<std::string, Histogram>> result;
  for (int64_t i = 0; i < count; ++i) {
    Histogram histogram = histogram_of(host[i], extremes[i]);
    if (histogram.count > 0) result.emplace_back(names[static_cast<size_t>(i)], histogram);
  }
  return result;
}

}  // namespace tessera::train
