#include "local_sgd/parameters.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "sharding/named_tensor.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"

namespace tessera::local_sgd {

namespace {

/// As memory_strides() of a contiguous tensor.
std::vector<int64_t> strides_by_rows(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1) strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

/// The values of a shard as real numbers: those of a complex one are pairs, in the last dimension.
at::Tensor values_of(const ParameterShard& shard) {
  const auto values = shard.tensor.detach();
  return values.is_complex() ? at::view_as_real(values) : values;
}

/// The range of values_of().
ElementRange range_of_values(const ParameterShard& shard) {
  ElementRange range = shard;
  if (!shard.tensor.is_complex()) return range;
  for (size_t i = 0; i < range.strides.size(); ++i)
    if (range.shape[i] != 1) range.strides[i] *= 2;
  if (!range.strides.empty() || range.shape.empty()) range.strides.push_back(1);
  range.shape.push_back(2);
  range.begin *= 2;
  range.numel *= 2;
  return range;
}

}  // namespace

Parameters::Parameters(std::vector<ParameterShard> shards, ProcessGroup replicas,
                       std::function<void()> publish, std::function<void()> prepare)
    : shards_(std::move(shards)),
      replicas_(std::move(replicas)),
      publish_(std::move(publish)),
      prepare_(std::move(prepare)) {
  for (const auto& shard : shards_)
    if (shard.tensor.defined()) materialize(shard.tensor);
}

void Parameters::measure() {
  const at::Device device = shards_.empty() ? at::Device(at::kCPU) : shards_[0].tensor.device();
  options_ = at::TensorOptions().dtype(at::kFloat).device(device);
  int64_t total = 0;
  for (const auto& shard : shards_) {
    storages_.push_back(storage_of(shard.tensor));
    const auto values = values_of(shard);
    total += values.numel();
    if (values.scalar_type() == at::kDouble) options_ = options_.dtype(at::kDouble);
  }
  const int64_t ranks = replicas_.size();
  for (int64_t rank = 0; rank < ranks; ++rank)
    counts_.push_back(total * (rank + 1) / ranks - total * rank / ranks);
}

void Parameters::check(int rank) const {
  std::vector<sharding::NamedTensor> named;
  for (const auto& shard : shards_) named.push_back({shard.parameter, shard.tensor});
  sharding::refuse_inference("LocalSgd", named, rank);
  for (size_t i = 0; i < shards_.size(); ++i) {
    const auto refuse = [&](const std::string& what, const char* expected) {
      throw UsageError(fmt::format("LocalSgd: rank {}: shard {} ({}) {}; expected {}", rank, i,
                                   shards_[i].parameter, what, expected));
    };
    const at::Tensor& tensor = shards_[i].tensor;
    if (!tensor.defined()) refuse("is undefined", "a tensor");
    if (tensor.layout() != at::kStrided) refuse("is sparse", "a dense tensor");
    if (!tensor.is_floating_point() && !tensor.is_complex()) {
      refuse(fmt::format("has dtype {}", c10::toString(tensor.scalar_type())),
             "a floating-point or complex dtype");
    }
    if (tensor.device() != shards_[0].tensor.device())
      refuse(fmt::format("is on {}", tensor.device().str()), "the device of the first shard");
  }
}

std::vector<std::string> Parameters::contract() const {
  std::vector<std::string> lines;
  for (const auto& shard : shards_) {
    lines.push_back(fmt::format("{} {} [{}] from element {}, {} elements", shard.parameter,
                                c10::toString(shard.tensor.scalar_type()),
                                fmt::join(shard.shape, ", "), shard.begin, shard.numel));
  }
  lines.push_back(fmt::format("{} replicas in the inner group", replicas_.size()));
  return lines;
}

Parameters::Storage Parameters::storage_of(const at::Tensor& tensor) {
  // An operator: it gives a parameter that is updated in the background its memory.
  return {tensor.detach().data_ptr(), tensor.numel(), tensor.scalar_type(), tensor.use_count() > 1};
}

std::string Parameters::changed(int rank) const {
  for (size_t i = 0; i < shards_.size(); ++i) {
    const Storage now = storage_of(shards_[i].tensor);
    const Storage& before = storages_[i];
    if (before.used_elsewhere && !now.used_elsewhere) {
      return fmt::format(
          "LocalSgd: rank {}: nothing else has the tensor of parameter {} any more, so it is not "
          "trained (was its optimizer destroyed?); expected a new LocalSgd with the optimizer's "
          "shards()",
          rank, shards_[i].parameter);
    }
    if (now.data == before.data && now.numel == before.numel && now.dtype == before.dtype) continue;
    return fmt::format(
        "LocalSgd: rank {}: parameter {} has other memory than at construction ({} elements of {}, "
        "before {} of {}); expected changes in place, or a new LocalSgd",
        rank, shards_[i].parameter, now.numel, c10::toString(now.dtype), before.numel,
        c10::toString(before.dtype));
  }
  return "";
}

int64_t Parameters::begin() const {
  return std::accumulate(counts_.begin(), counts_.begin() + replicas_.rank(), int64_t{0});
}

at::Tensor Parameters::part() const {
  const at::NoGradGuard no_grad;
  const int64_t first = begin(), last = first + numel();
  const at::Tensor result = at::empty({numel()}, options_);
  int64_t at = 0;
  for (const auto& shard : shards_) {
    const at::Tensor values = values_of(shard).reshape({-1});
    const int64_t from = std::max(at, first), to = std::min(at + values.numel(), last);
    if (from < to)
      result.narrow(0, from - first, to - from).copy_(values.narrow(0, from - at, to - from));
    at += values.numel();
  }
  return result;
}

std::vector<ElementRange> Parameters::ranges() const {
  const int64_t first = begin(), last = first + numel();
  std::vector<ElementRange> result;
  int64_t at = 0;
  for (const auto& shard : shards_) {
    ElementRange range = range_of_values(shard);
    const int64_t numel = range.numel;
    const int64_t from = std::max(at, first), to = std::min(at + numel, last);
    if (from < to) {
      range.begin += from - at;
      range.numel = to - from;
      // part() reads a tensor of the whole shape row by row, and another one as it lies in memory.
      if (shard.tensor.dim() != 1) range.strides = strides_by_rows(range.shape);
      result.push_back(std::move(range));
    }
    at += numel;
  }
  return result;
}

void Parameters::write(const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  at::Tensor all = part;
  if (replicas_.size() > 1) {
    all = at::empty({std::accumulate(counts_.begin(), counts_.end(), int64_t{0})}, options_);
    all.narrow(0, begin(), numel()).copy_(part);
    replicas_.all_gather(all, counts_, "LocalSgd: parameters");
  }
  int64_t at = 0;
  for (auto& shard : shards_) {
    const at::Tensor values = values_of(shard);
    values.copy_(all.narrow(0, at, values.numel()).view(values.sizes()));
    at += values.numel();
  }
  if (publish_) publish_();
}

}  // namespace tessera::local_sgd
