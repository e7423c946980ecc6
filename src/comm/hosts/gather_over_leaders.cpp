#include "comm/hosts/gather_over_leaders.h"

namespace tessera::comm {

std::vector<int64_t> GatherOverLeaders::count_by_host(const std::vector<int64_t>& counts) const {
  std::vector<int64_t> sums(map_.hosts(), 0);
  for (int rank = 0; rank < map_.size(); ++rank) sums[map_.host_of(rank)] += counts[rank];
  return sums;
}

void GatherOverLeaders::gather_table(const at::Tensor& table, const std::vector<int64_t>& counts) {
  if (table.numel() == 0) return;
  if (map_.members(host_)[0] == rank_) {
    std::vector<int> leaders;
    for (int host = 0; host < map_.hosts(); ++host) leaders.push_back(map_.members(host)[0]);
    messenger_.gather_blocks(table, count_by_host(counts), leaders);
  }
  if (local_) local_->broadcast(table, 0);
}

void GatherOverLeaders::gather(const at::Tensor& flat, const std::vector<int64_t>& counts) {
  if (!local_) return gather_table(flat, counts);
  const auto starts = segment_starts(counts);
  const auto host_counts = count_by_host(counts);
  const auto segment = [&](int rank) { return flat.narrow(0, starts[rank], counts[rank]); };
  auto table = at::empty_like(flat);
  auto here = table.narrow(0, segment_starts(host_counts)[host_], host_counts[host_]);
  std::vector<int64_t> local;
  for (const int rank : map_.members(host_)) local.push_back(counts[rank]);
  const int own = map_.local_rank(rank_);
  here.narrow(0, segment_starts(local)[own], local[own]).copy_(segment(rank_));
  if (here.numel() > 0) local_->all_gather(here, local);
  gather_table(table, counts);
  int64_t begin = 0;
  for (int host = 0; host < map_.hosts(); ++host) {
    for (const int rank : map_.members(host)) {
      if (rank != rank_) segment(rank).copy_(table.narrow(0, begin, counts[rank]));
      begin += counts[rank];
    }
  }
}

}  // namespace tessera::comm
