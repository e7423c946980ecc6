#include "comm/hosts/exchange_sums.h"

#include "comm/base/tree_sum.h"
#include "comm/shm/shm_kernels.h"

namespace tessera::comm {

bool ExchangeSums::fits(const HostMap& map, const HostSumTree& tree, at::ScalarType dtype) {
  return map.hosts() == 2 && map.members(0).size() == map.members(1).size() &&
         tree.leaves[0].size() == 1 && tree.leaves[1].size() == 1 &&
         (map.size() == 2 || !is_narrow(dtype));
}

ExchangeSums::ExchangeSums(Messenger& messenger, const HostMap& map, int rank,
                           const Segments& parts, double scale)
    : messenger_(messenger),
      host_(map.host_of(rank)),
      local_(map.local_rank(rank)),
      peer_(map.members(1 - host_)[local_]),
      parts_(parts),
      scale_(scale) {
  for (int64_t round = 0; round < kAhead; ++round) post_receive(round);
}

void ExchangeSums::visit(int64_t round, const ShmTransport::Window& window) {
  direct_ = window.direct;
  const int64_t n = parts_.count(local_, round);
  if (n == 0) return;
  if (round >= kAhead) combine(round - kAhead);
  auto& item = flying_[round % kAhead];
  item.outputs.clear();
  std::vector<const std::byte*> inputs;
  for (int rank = 0; rank < parts_.size(); ++rank) {
    inputs.push_back(window(local_, rank));
    if (direct_ || rank == local_) item.outputs.push_back(window(local_, rank));
  }
  if (parts_.size() == 1) {
    item.ours = parts_.window(local_, round);
  } else {
    if (!item.ours.defined()) item.ours = at::empty({n}, parts_.flat.options());
    sum_ranks(parts_.flat.scalar_type(), {data_of(item.ours)}, inputs, n);
  }
  item.leaving = messenger_.send(item.ours.narrow(0, 0, n), peer_, static_cast<int>(round));
}

void ExchangeSums::finish() {
  while (parts_.count(local_, combined_) > 0) combine(combined_);
  messenger_.finish();
}

void ExchangeSums::post_receive(int64_t round) {
  const int64_t n = parts_.count(local_, round);
  if (n == 0) return;
  auto& item = flying_[round % kAhead];
  if (!item.theirs.defined()) item.theirs = at::empty({n}, parts_.flat.options());
  item.arriving = messenger_.receive(item.theirs.narrow(0, 0, n), peer_, static_cast<int>(round));
}

void ExchangeSums::combine(int64_t round) {
  auto& item = flying_[round % kAhead];
  messenger_.wait(item.arriving);
  messenger_.wait(item.leaving);
  const auto& first = host_ == 0 ? item.ours : item.theirs;
  const auto& second = host_ == 0 ? item.theirs : item.ours;
  const int64_t n = parts_.count(local_, round);
  sum_ranks(parts_.flat.scalar_type(), item.outputs, {data_of(first), data_of(second)}, n, scale_);
  combined_ = round + 1;
  post_receive(round + kAhead);
}

}  // namespace tessera::comm
