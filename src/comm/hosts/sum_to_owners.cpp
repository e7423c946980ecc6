#include "comm/hosts/sum_to_owners.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/base/tree_sum.h"
#include "comm/shm/shm_kernels.h"

namespace tessera::comm {

SumToOwners::SumToOwners(Messenger& messenger, const HostMap& map, const HostSumTree& tree,
                         int rank, const Segments& segments, const Transport::Target& target,
                         Encoding encoding)
    : messenger_(messenger),
      map_(map),
      tree_(tree),
      rank_(rank),
      host_(map.host_of(rank)),
      segments_(segments),
      target_(target),
      encoding_(encoding),
      dtype_(segments.flat.scalar_type()),
      wide_(is_narrow(dtype_) ? at::kFloat : dtype_) {
  for (int64_t round = 0; round < kAhead; ++round) post_receives(round);
}

bool SumToOwners::is_read(int segment, int64_t round) const {
  const bool here = map_.host_of(segment) == host_;
  return (here ? segment : map_.handler(host_, segment, round)) != rank_;
}

void SumToOwners::visit(int64_t round, const ShmTransport::Window& window) {
  auto& sent = sent_[round % kAhead];
  for (const auto ticket : sent) messenger_.wait(ticket);
  sent.clear();
  for (int segment = 0; segment < map_.size(); ++segment) {
    if (segments_.count(segment, round) == 0 || map_.host_of(segment) == host_) continue;
    if (map_.handler(host_, segment, round) != rank_) continue;
    for (const int leaf : tree_.leaves[host_]) {
      // Nobody writes this rank's own values, so they are sent in place.
      auto sum = tree_.nodes[leaf].ranks == std::vector<int>{rank_}
                     ? segments_.window(segment, round)
                     : sum_of(leaf, segment, window);
      if (encoding_) sum = encoding_.encode(sum);
      sent.push_back(messenger_.send(std::move(sum), segment, static_cast<int>(round)));
    }
  }
  if (segments_.count(rank_, round) > 0) {
    auto& own = own_[round % kAhead];
    own.assign(tree_.nodes.size(), at::Tensor());
    for (const int leaf : tree_.leaves[host_]) own[leaf] = sum_of(leaf, rank_, window);
  }
  if (round >= kLag) combine(round - kLag);
}

void SumToOwners::complete() {
  const int64_t rounds = segments_.windows;
  for (int64_t round = std::max<int64_t>(0, rounds - kLag); round < rounds; ++round) combine(round);
  messenger_.finish();
  if (consumer_failed_) std::rethrow_exception(consumer_failed_);
}

/// A single value of 16 bits is sent as it is; sums of several are float.
at::ScalarType SumToOwners::dtype_of(int leaf) const {
  return tree_.nodes[leaf].ranks.size() == 1 ? dtype_ : wide_;
}

void SumToOwners::post_receives(int64_t round) {
  const int64_t n = segments_.count(rank_, round);
  if (n == 0) return;
  for (int host = 0; host < map_.hosts(); ++host) {
    if (host == host_) continue;
    for (const int leaf : tree_.leaves[host]) {
      auto sum = encoding_ ? encoding_.message(n)
                           : at::empty({n}, at::TensorOptions().dtype(dtype_of(leaf)));
      const auto ticket =
          messenger_.receive(sum, map_.handler(host, rank_, round), static_cast<int>(round));
      arriving_[round % kAhead].push_back({ticket, leaf, std::move(sum)});
    }
  }
}

at::Tensor SumToOwners::sum_of(int leaf, int segment, const ShmTransport::Window& window) const {
  const int64_t n = segments_.count(segment, window.round);
  const auto& ranks = tree_.nodes[leaf].ranks;
  std::vector<const std::byte*> inputs;
  for (const int rank : ranks) inputs.push_back(window(segment, map_.local_rank(rank)));
  const auto sum = at::empty({n}, at::TensorOptions().dtype(dtype_of(leaf)));
  if (ranks.size() == 1) {
    std::memcpy(sum.data_ptr(), inputs[0], n * segments_.width);
    return sum;
  }
  if (wide_ == dtype_) {
    sum_ranks(dtype_, {data_of(sum)}, inputs, n);
    return sum;
  }
  const auto parts = at::empty({static_cast<int64_t>(ranks.size()), n}, sum.options());
  for (size_t i = 0; i < ranks.size(); ++i) {
    parts[static_cast<int64_t>(i)].copy_(
        at::from_blob(const_cast<std::byte*>(inputs[i]), {n}, at::TensorOptions().dtype(dtype_)));
  }
  return sum_rows(parts, 1);
}

/// Adds up window `round` of this rank's segment over the hosts.
void SumToOwners::combine(int64_t round) {
  const int64_t n = segments_.count(rank_, round);
  if (n == 0) return;
  auto values = std::move(own_[round % kAhead]);
  for (auto& item : arriving_[round % kAhead]) {
    messenger_.wait(item.ticket);
    values[item.leaf] = encoding_ ? encoding_.decode(item.sum, n) : std::move(item.sum);
  }
  arriving_[round % kAhead].clear();
  post_receives(round + kAhead);
  deliver(round * segments_.step, add_up(std::move(values), n));
}

/// `values`: the values of the leaves, which are overwritten.
at::Tensor SumToOwners::add_up(std::vector<at::Tensor> values, int64_t n) const {
  for (auto& value : values)
    if (value.defined() && value.scalar_type() != wide_) value = value.to(wide_);
  for (size_t node = 0; node < values.size(); ++node) {
    if (values[node].defined()) continue;
    const auto& right = values[tree_.nodes[node].right];
    values[node] = values[tree_.nodes[node].left];
    sum_ranks(wide_, {data_of(values[node])}, {data_of(values[node]), data_of(right)}, n,
              node + 1 == values.size() ? target_.scale : 1);
  }
  return values.back().to(dtype_);
}

void SumToOwners::deliver(int64_t offset, const at::Tensor& sum) {
  if (!target_.consume) {
    const auto output = target_.output.defined() ? target_.output : segments_[rank_];
    output.narrow(0, offset, sum.numel()).copy_(sum);
    return;
  }
  if (consumer_failed_) return;
  try {
    (*target_.consume)(offset, sum);
  } catch (...) {
    consumer_failed_ = std::current_exception();  // the other ranks still need this rank's sums
  }
}

}  // namespace tessera::comm
