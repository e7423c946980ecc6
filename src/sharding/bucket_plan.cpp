#include "sharding/bucket_plan.h"

#include <algorithm>

#include <c10/core/alignment.h>

namespace tessera::sharding {

std::vector<std::vector<size_t>> plan_buckets(const std::vector<at::Tensor>& tensors,
                                              const std::vector<size_t>& order, int64_t first_bytes,
                                              int64_t cap_bytes) {
  struct Kind {
    at::ScalarType dtype;
    at::Device device;
    int64_t limit;
    int64_t bytes = 0;
    size_t bucket = 0;
    bool open = false;
  };
  std::vector<Kind> kinds;
  std::vector<std::vector<size_t>> buckets;
  for (const auto i : order) {
    const auto& tensor = tensors[i];
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const Kind& k) {
      return k.dtype == tensor.scalar_type() && k.device == tensor.device();
    });
    if (kind == kinds.end())
      kind = kinds.insert(kinds.end(), Kind{tensor.scalar_type(), tensor.device(), first_bytes});
    if (!kind->open) {
      kind->open = true;
      kind->bytes = 0;
      kind->bucket = buckets.size();
      buckets.emplace_back();
    }
    buckets[kind->bucket].push_back(i);
    kind->bytes += tensor.numel() * static_cast<int64_t>(tensor.element_size());
    if (kind->bytes >= kind->limit) {
      kind->open = false;
      kind->limit = cap_bytes;
    }
  }
  for (auto& bucket : buckets) {
    std::stable_partition(bucket.begin(), bucket.end(),
                          [&](size_t i) { return tensors[i].nbytes() % c10::gAlignment == 0; });
  }
  return buckets;
}

}  // namespace tessera::sharding
