#include "tessera/weights/load_shard.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "sharding/bucket.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"

namespace tessera {
namespace {

bool row_major(const ParameterShard& shard) {
  return shard.strides.empty() ||
         shard.strides == memory_strides(at::empty(shard.shape, at::kMeta));
}

/// The elements of `shard` in the parameter's memory order, in the dtype of the file.
at::Tensor read(const TensorSource& weights, const std::string& name, const ParameterShard& shard) {
  if (row_major(shard)) {
    at::Tensor part = at::empty({shard.numel}, weights.scalar_type(name));
    weights.load_slice(name, shard.begin, shard.numel, part);
    return part;
  }
  const at::Tensor whole = weights.load(name);
  const at::Tensor placed =
      at::empty_strided(shard.shape, shard.strides, whole.options()).copy_(whole);
  return sharding::in_memory_order(placed).narrow(0, shard.begin, shard.numel);
}

}  // namespace

void load_shard(const TensorSource& weights, const std::string& name, const ParameterShard& shard) {
  const torch::NoGradGuard no_grad;
  const auto& entry = weights.info(name);
  if (entry.shape != shard.shape)
    throw UsageError(fmt::format("{}: {} has shape [{}]; expected [{}], that of parameter {}",
                                 weights.path(), name, fmt::join(entry.shape, ", "),
                                 fmt::join(shard.shape, ", "), shard.parameter));
  if (shard.numel == 0) return;
  materialize(shard.tensor);  // system calls cannot write to deferred memory
  const at::Tensor to = shard.tensor.detach();
  const bool same = to.device().is_cpu() && to.scalar_type() == weights.scalar_type(name);
  if (same && to.is_contiguous() && row_major(shard))
    weights.load_slice(name, shard.begin, shard.numel, to);
  else if (to.is_non_overlapping_and_dense())
    sharding::in_memory_order(to).copy_(read(weights, name, shard));
  else to.copy_(weights.load(name));  // a whole parameter with gaps
}

void check_equal_shards(const TensorSource& weights, const std::string& first,
                        const std::string& second, const ParameterShard& shard,
                        const std::string& advice) {
  const at::Tensor a = read(weights, first, shard), b = read(weights, second, shard);
  if (!at::equal(a, b.to(a.scalar_type())))
    throw UsageError(
        fmt::format("{}: \"{}\" differs from \"{}\"{}", weights.path(), second, first, advice));
}

}  // namespace tessera
