#include "comm/hosts/exchange_sums.h"

#include <algorithm>
#include <numeric>

#include "comm/base/tensor_bytes.h"
#include "comm/base/tree_sum.h"
#include "comm/shm/shm_kernels.h"

namespace tessera::comm {

bool ExchangeSums::fits(const HostMap& map, const HostSumTree& tree, at::ScalarType dtype) {
  return map.hosts() == 2 && map.members(0).size() == map.members(1).size() &&
         tree.leaves[0].size() == 1 && tree.leaves[1].size() == 1 && !is_narrow(dtype);
}

ExchangeSums::ExchangeSums(Messenger& messenger, const HostMap& map, int rank,
                           const at::Tensor& flat, const std::vector<int64_t>& counts, double scale)
    : messenger_(messenger),
      host_(map.host_of(rank)),
      local_(map.local_rank(rank)),
      peer_(map.members(1 - host_)[local_]),
      ranks_(static_cast<int>(counts.size())),
      count_(counts[local_]),
      step_(ShmTransport::window_step(counts.size(), static_cast<int64_t>(flat.element_size()))),
      part_(flat.narrow(0, std::accumulate(counts.begin(), counts.begin() + local_, int64_t{0}),
                        count_)),
      scale_(scale) {
  for (int64_t round = 0; round < kAhead; ++round) post_receive(round);
}

void ExchangeSums::visit(int64_t round, const ShmTransport::Window& window) {
  direct_ = window.direct;
  const int64_t n = count(round);
  if (n == 0) return;
  if (round >= kAhead) combine(round - kAhead);
  std::vector<const std::byte*> inputs;
  for (int rank = 0; rank < ranks_; ++rank) inputs.push_back(window(local_, rank));
  auto& item = flying_[round % kAhead];
  item.outputs.clear();
  for (int rank = 0; direct_ && rank < ranks_; ++rank) item.outputs.push_back(window(local_, rank));
  if (!direct_) item.outputs.push_back(data_of(part_) + round * step_ * part_.element_size());
  if (!item.ours.defined()) item.ours = at::empty({n}, part_.options());
  sum_ranks(part_.scalar_type(), {data_of(item.ours)}, inputs, n);
  item.leaving = messenger_.send(item.ours.narrow(0, 0, n), peer_, static_cast<int>(round));
  rounds_ = round + 1;
}

void ExchangeSums::finish() {
  while (combined_ < rounds_) combine(combined_);
  messenger_.finish();
}

int64_t ExchangeSums::count(int64_t round) const {
  return std::clamp<int64_t>(count_ - round * step_, 0, step_);
}

void ExchangeSums::post_receive(int64_t round) {
  const int64_t n = count(round);
  if (n == 0) return;
  auto& item = flying_[round % kAhead];
  if (!item.theirs.defined()) item.theirs = at::empty({n}, part_.options());
  item.arriving = messenger_.receive(item.theirs.narrow(0, 0, n), peer_, static_cast<int>(round));
}

void ExchangeSums::combine(int64_t round) {
  auto& item = flying_[round % kAhead];
  messenger_.wait(item.arriving);
  messenger_.wait(item.leaving);
  const auto& first = host_ == 0 ? item.ours : item.theirs;
  const auto& second = host_ == 0 ? item.theirs : item.ours;
  const int64_t n = count(round);
  sum_ranks(part_.scalar_type(), item.outputs, {data_of(first), data_of(second)}, n, scale_);
  combined_ = round + 1;
  post_receive(round + kAhead);
}

}  // namespace tessera::comm
