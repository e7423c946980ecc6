#include "sharding/layout.h"

#include <algorithm>
#include <numeric>

namespace tessera {

const char* partition_name(Partition partition) {
  switch (partition) {
    case Partition::flat:
      return "flat";
    case Partition::whole:
      return "whole";
    case Partition::first_fit:
      return "first_fit";
  }
  return "unknown";
}

std::vector<int> assign_owners(const std::vector<int64_t>& sizes, std::vector<int64_t>& load,
                               Partition partition) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  if (partition == Partition::whole) {
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  }
  std::vector<int> owners(sizes.size());
  for (const auto tensor : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[tensor] = static_cast<int>(least - load.begin());
    *least += sizes[tensor];
  }
  return owners;
}

namespace sharding {

void Layout::cut(std::vector<int64_t> counts) {
  counts_ = std::move(counts);
  begins_.assign(counts_.size() + 1, 0);
  std::partial_sum(counts_.begin(), counts_.end(), begins_.begin() + 1);
}

Layout Layout::flat(std::vector<int64_t> sizes, int world) {
  Layout layout;
  layout.sizes_ = std::move(sizes);
  int64_t total = 0;
  for (size_t i = 0; i < layout.sizes_.size(); ++i) {
    layout.offsets_.push_back(total);
    layout.in_order_.push_back(i);
    total += layout.sizes_[i];
  }
  const int64_t part = (total + world - 1) / world;
  std::vector<int64_t> counts;
  for (int rank = 0; rank < world; ++rank)
    counts.push_back(std::clamp<int64_t>(total - rank * part, 0, part));
  layout.cut(std::move(counts));
  return layout;
}

Layout Layout::owned(std::vector<int64_t> sizes, const std::vector<int>& owners, int world) {
  Layout layout;
  layout.sizes_ = std::move(sizes);
  layout.offsets_.resize(layout.sizes_.size());
  std::vector<int64_t> counts(world, 0);
  int64_t total = 0;
  for (int rank = 0; rank < world; ++rank) {
    for (size_t i = 0; i < layout.sizes_.size(); ++i) {
      if (owners[i] != rank) continue;
      layout.offsets_[i] = total;
      layout.in_order_.push_back(i);
      total += layout.sizes_[i];
      counts[rank] += layout.sizes_[i];
    }
  }
  layout.cut(std::move(counts));
  return layout;
}

std::vector<LayoutSlice> Layout::slices(int rank) const {
  const int64_t begin = begins_[rank], end = begins_[rank + 1];
  std::vector<LayoutSlice> result;
  for (const auto tensor : in_order_) {
    const int64_t from = std::max(begin, offsets_[tensor]),
                  to = std::min(end, offsets_[tensor] + sizes_[tensor]);
    if (from < to) result.push_back({tensor, from - offsets_[tensor], to - from, from});
  }
  return result;
}

}  // namespace sharding
}  // namespace tessera
