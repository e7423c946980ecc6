#include "comm/group/checked_transport.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <fmt/format.h>
#include <xxhash.h>

#include "comm/base/flat_tensor.h"
#include "comm/base/tree_sum.h"

namespace tessera::comm {
namespace {

using Digests = std::vector<uint64_t>;

/// `flat` is 1-D and contiguous.
uint64_t digest_of(const at::Tensor& flat) {
  return XXH3_64bits(flat.numel() > 0 ? flat.data_ptr() : nullptr, flat.nbytes());
}

Digests digests_of(const at::Tensor& flat, const Counts& counts) {
  Digests digests;
  for (size_t r = 0; r < counts.size(); ++r)
    digests.push_back(digest_of(segment_of(flat, counts, static_cast<int>(r))));
  return digests;
}

/// Compares values and not bits, because the bits of a NaN depend on the kernel.
bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return a.eq(b).logical_or_(a.ne(a).logical_and_(b.ne(b))).all().item<bool>();
}

class CheckedTransport : public TransportOver {
 public:
  CheckedTransport(std::unique_ptr<Transport> inner, const World& world)
      : TransportOver(std::move(inner)), rank_(world.rank), size_(world.size) {}

  void all_reduce(at::Tensor flat, double scale) override {
    const auto input = flat.clone();
    inner_->all_reduce(flat, scale);
    // Each rank verifies its part, and the digests show that all ranks have the same parts.
    Counts counts(size_, flat.numel() / size_);
    counts.back() += flat.numel() % size_;
    verify_sum(input, counts, segment_of(flat, counts, rank_), scale);
    verify_same(digest_of(flat), "differs from rank 0's");
  }

  void reduce(at::Tensor flat, int root) override {
    const auto input = flat.clone();
    inner_->reduce(flat, root);
    Counts counts(size_, 0);
    counts[root] = flat.numel();
    verify_sum(input, counts, rank_ == root ? flat : flat.narrow(0, 0, 0), 1);
    throw_if_wrong(rank_ != root && digest_of(input) != digest_of(flat),
                   "has changed, although it is not the root");
  }

  void broadcast(at::Tensor flat, int root) override {
    const uint64_t source = digest_of(flat);
    inner_->broadcast(flat, root);
    const auto sources = gather({source});
    throw_if_wrong(digest_of(flat) != sources[root][0], "differs from the root's tensor");
  }

  void all_gather(at::Tensor flat, const Counts& counts) override {
    const uint64_t source = digest_of(segment_of(flat, counts, rank_));
    inner_->all_gather(flat, counts);
    const auto sources = gather({source});
    const auto received = digests_of(flat, counts);
    int from = 0;
    while (from < size_ && received[from] == sources[from][0]) ++from;
    throw_if_wrong(from < size_, fmt::format("differs from the input of rank {}", from));
  }

  void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) override {
    const auto input = flat.clone();
    auto result = target.output.defined() ? target.output : segment_of(flat, counts, rank_);
    if (!target.consume) {
      inner_->reduce_scatter(flat, counts, target);
      return verify_sum(input, counts, result, target.scale);
    }
    result = at::empty({counts[rank_]}, flat.options());
    const ConsumeRun keep = [&](int64_t offset, const at::Tensor& run) {
      result.narrow(0, offset, run.numel()).copy_(run);
      (*target.consume)(offset, run);
    };
    inner_->reduce_scatter(flat, counts, {target.scale, &keep});
    verify_sum(input, counts, result, target.scale);
  }

  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override {
    const auto sources = gather(digests_of(input, send_counts));
    inner_->all_to_all(output, input, recv_counts, send_counts);
    const auto received = digests_of(output, recv_counts);
    int from = 0;
    while (from < size_ && received[from] == sources[from][rank_]) ++from;
    throw_if_wrong(from < size_, fmt::format("differs from what rank {} sent", from));
  }

 private:
  /// Every rank's numbers; each rank passes equally many.
  std::vector<Digests> gather(const Digests& mine) {
    const auto count = static_cast<int64_t>(mine.size());
    auto all = at::empty({count * size_}, at::kLong);
    auto* data = static_cast<char*>(all.data_ptr());
    const size_t bytes = mine.size() * sizeof(uint64_t);
    std::memcpy(data + rank_ * bytes, mine.data(), bytes);
    inner_->all_gather(all, Counts(size_, count));
    std::vector<Digests> result(size_, Digests(mine.size()));
    for (int r = 0; r < size_; ++r) std::memcpy(result[r].data(), data + r * bytes, bytes);
    return result;
  }

  /// Throws on every rank if `wrong` is true on any, with the text `how` of the lowest such rank.
  void throw_if_wrong(bool wrong, const std::string& how) {
    constexpr size_t kWords = 12;
    Digests mine(kWords, 0);
    mine[0] = wrong;
    std::memcpy(&mine[1], how.data(), std::min(how.size(), (kWords - 1) * sizeof(uint64_t) - 1));
    const auto all = gather(mine);
    std::string ranks, text;
    for (int r = 0; r < size_; ++r) {
      if (all[r][0] == 0) continue;
      if (text.empty()) text = reinterpret_cast<const char*>(&all[r][1]);
      ranks += fmt::format("{}{}", ranks.empty() ? "" : ", ", r);
    }
    if (ranks.empty()) return;
    throw WrongResult(fmt::format("check_results: the result on {} {} {}",
                                  ranks.find(',') == std::string::npos ? "rank" : "ranks", ranks,
                                  text));
  }

  void verify_same(uint64_t digest, const std::string& how) {
    throw_if_wrong(digest != gather({digest})[0][0], how);
  }

  /// `result` must be the sum of this rank's segment of all `input`s, times `scale`.
  void verify_sum(const at::Tensor& input, const Counts& counts, const at::Tensor& result,
                  double scale) {
    const int64_t own = counts[rank_];
    auto inputs = at::empty({own * size_}, input.options());
    inner_->all_to_all(inputs, input, Counts(size_, own), counts);
    const auto sum = sum_rows(inputs.view({size_, own}), scale);
    throw_if_wrong(!same_values(sum, result), "is not the sum of the ranks' inputs");
  }

  int rank_, size_;
};

}  // namespace

std::unique_ptr<Transport> make_checked_transport(std::unique_ptr<Transport> inner,
                                                  const World& world) {
  return std::make_unique<CheckedTransport>(std::move(inner), world);
}

}  // namespace tessera::comm
