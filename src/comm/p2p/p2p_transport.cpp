#include "comm/p2p/p2p_transport.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "comm/base/tree_sum.h"
#include "comm/p2p/messenger.h"

namespace tessera::comm {
namespace {

// Up to this many bytes, one round of whole tensors is faster than two rounds of slices.
constexpr int64_t kSmallBytes = 64 << 10;
// Slices are sent in parts of this size, so that summing overlaps with receiving and scratch memory
// is bounded.
constexpr int64_t kMessageBytes = 4 << 20;
constexpr int64_t kExchangeBytes = 1 << 20;  // of a message between two ranks that exchange all
constexpr int64_t kExchangesAhead = 4;       // such messages that a rank expects at a time

std::vector<int64_t> offsets_of(const std::vector<int64_t>& counts) {
  std::vector<int64_t> offsets(counts.size() + 1, 0);
  std::partial_sum(counts.begin(), counts.end(), offsets.begin() + 1);
  return offsets;
}

std::vector<int64_t> even_counts(int64_t numel, int size) {
  std::vector<int64_t> counts(size, numel / size);
  for (int r = 0; r < numel % size; ++r) ++counts[r];
  return counts;
}

class P2pTransport : public Transport {
 public:
  P2pTransport(const World& world, std::unique_ptr<Mailbox> mailbox)
      : wire_(world, std::move(mailbox)), rank_(world.rank), size_(world.size), all_(world.size) {
    std::iota(all_.begin(), all_.end(), 0);
  }

  const char* name() const override { return wire_.name(); }
  void set_timeout(std::chrono::milliseconds timeout) override { wire_.set_timeout(timeout); }
  void set_stopped_timeout(std::chrono::milliseconds timeout) override {
    wire_.set_silence(timeout);
  }
  Sent sent() const override { return wire_.sent(); }

  std::vector<OpHeader> exchange(const OpHeader& mine) override {
    wire_.begin(describe(mine));
    constexpr auto bytes = static_cast<int64_t>(sizeof(OpHeader));
    auto table = at::empty({size_ * bytes}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(table.narrow(0, rank_ * bytes, bytes).data_ptr(), &mine, bytes);
    wire_.gather_blocks(table, std::vector<int64_t>(size_, bytes), all_);
    std::vector<OpHeader> headers(size_);
    std::memcpy(headers.data(), table.data_ptr(), headers.size() * sizeof(OpHeader));
    return headers;
  }

  void all_reduce(at::Tensor flat, double scale) override {
    if (flat.nbytes() <= static_cast<size_t>(kSmallBytes)) return all_reduce_small(flat, scale);
    if (size_ == 2) return exchange_with_peer(flat, scale);
    const auto counts = even_counts(flat.numel(), size_);
    reduce_scatter(flat, counts, scale, nullptr);
    all_gather(flat, counts);
  }

  void reduce(at::Tensor flat, int root) override {
    wire_.begin("reduce");
    std::vector<int64_t> counts(size_, 0);
    counts[root] = flat.numel();
    sum_to_owners(flat, counts, 1, nullptr);
  }

  void broadcast(at::Tensor flat, int root) override {
    wire_.begin("broadcast");
    if (size_ == 2) {
      if (rank_ == root) wire_.send(flat, 1 - root);
      else wire_.receive(flat, root);
      return wire_.finish();
    }
    if (flat.nbytes() <= static_cast<size_t>(kSmallBytes)) {
      std::vector<int64_t> counts(size_, 0);
      counts[root] = flat.numel();
      return wire_.gather_blocks(flat, counts, all_);
    }
    const auto counts = even_counts(flat.numel(), size_);
    const auto offsets = offsets_of(counts);
    const auto segment = [&](int r) { return flat.narrow(0, offsets[r], counts[r]); };
    if (rank_ == root) {
      for (int peer = 0; peer < size_; ++peer) {
        if (peer != root) wire_.send(segment(peer), peer, 0);
      }
    } else {
      wire_.receive(segment(rank_), root, 0);
    }
    wire_.finish();
    wire_.begin("broadcast");
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      if (rank_ != root) wire_.receive(segment(peer), peer, 0);
      if (peer != root) wire_.send(segment(rank_), peer, 0);
    }
    wire_.finish();
  }

  void all_gather(at::Tensor flat, const std::vector<int64_t>& counts) override {
    wire_.begin("all_gather");
    if (size_ > 2 && flat.nbytes() <= static_cast<size_t>(kSmallBytes))
      return wire_.gather_blocks(flat, counts, all_);
    const auto offsets = offsets_of(counts);
    for (int step = 1; step < size_; ++step) {
      const int from = (rank_ - step + size_) % size_;
      wire_.receive(flat.narrow(0, offsets[from], counts[from]), from, 0);
    }
    for (int step = 1; step < size_; ++step) {
      wire_.send(flat.narrow(0, offsets[rank_], counts[rank_]), (rank_ + step) % size_, 0);
    }
    wire_.finish();
  }

  void reduce_scatter(at::Tensor flat, const std::vector<int64_t>& counts, double scale,
                      const ConsumeRun* consume) override {
    wire_.begin("reduce_scatter");
    sum_to_owners(flat, counts, scale, consume);
  }

  void all_to_all(at::Tensor output, at::Tensor input, const std::vector<int64_t>& recv_counts,
                  const std::vector<int64_t>& send_counts) override {
    wire_.begin("all_to_all");
    const auto in = offsets_of(send_counts), out = offsets_of(recv_counts);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) wire_.receive(output.narrow(0, out[peer], recv_counts[peer]), peer, 0);
    }
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) wire_.send(input.narrow(0, in[peer], send_counts[peer]), peer, 0);
    }
    output.narrow(0, out[rank_], recv_counts[rank_])
        .copy_(input.narrow(0, in[rank_], send_counts[rank_]));
    wire_.finish();
  }

  void abort() noexcept override { wire_.abort(); }

 private:
  void all_reduce_small(at::Tensor flat, double scale) {
    wire_.begin("all_reduce");
    auto parts = at::empty({size_, flat.numel()}, flat.options());
    parts[rank_].copy_(flat);
    wire_.gather_blocks(parts.view({-1}), std::vector<int64_t>(size_, flat.numel()), all_);
    flat.copy_(sum_rows(parts, scale));
  }

  /// The all-reduce of two ranks: each sends all to the other. These are the bytes of a
  /// reduce-scatter and an all-gather, and no message waits for another one's arrival.
  void exchange_with_peer(const at::Tensor& flat, double scale) {
    wire_.begin("all_reduce");
    const int peer = 1 - rank_;
    const int64_t part = std::max<int64_t>(1, kExchangeBytes / flat.element_size());
    const int64_t parts = (flat.numel() + part - 1) / part;
    const auto slice = [&](int64_t i) {
      return flat.narrow(0, i * part, std::min(part, flat.numel() - i * part));
    };
    at::Tensor scratch[kExchangesAhead];
    Messenger::Ticket arriving[kExchangesAhead];
    const auto post_receive = [&](int64_t i) {
      auto& rows = scratch[i % kExchangesAhead];
      if (!rows.defined()) rows = at::empty({2, std::min(part, flat.numel())}, flat.options());
      arriving[i % kExchangesAhead] =
          wire_.receive(rows[peer].narrow(0, 0, slice(i).numel()), peer, static_cast<int>(i));
    };
    std::vector<Messenger::Ticket> leaving;
    for (int64_t i = 0; i < std::min(parts, kExchangesAhead); ++i) post_receive(i);
    for (int64_t i = 0; i < parts; ++i)
      leaving.push_back(wire_.send(slice(i), peer, static_cast<int>(i)));
    for (int64_t i = 0; i < parts; ++i) {
      wire_.wait(arriving[i % kExchangesAhead]);
      wire_.wait(leaving[i]);
      const auto mine = slice(i);
      const auto rows = scratch[i % kExchangesAhead].narrow(1, 0, mine.numel());
      rows[rank_].copy_(mine);
      mine.copy_(sum_rows(rows, scale));
      if (i + kExchangesAhead < parts) post_receive(i + kExchangesAhead);
    }
    wire_.finish();
  }

  /// Sums each rank's segment of `flat` on that rank, part by part, with two parts in flight.
  void sum_to_owners(at::Tensor flat, const std::vector<int64_t>& counts, double scale,
                     const ConsumeRun* consume) {
    const auto offsets = offsets_of(counts);
    const int64_t part = std::max<int64_t>(
        1, kMessageBytes / std::max<int64_t>(1, flat.element_size() * (size_ - 1)));
    const int64_t own = counts[rank_];
    const int64_t own_parts = (own + part - 1) / part;
    const auto length = [&](int64_t total, int64_t i) { return std::min(part, total - i * part); };
    at::Tensor scratch[2];
    std::vector<Messenger::Ticket> receives[2];
    const auto post_receives = [&](int64_t i) {
      auto& parts = scratch[i % 2];
      if (!parts.defined()) parts = at::empty({size_, std::min(part, own)}, flat.options());
      receives[i % 2].clear();
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_) continue;
        receives[i % 2].push_back(
            wire_.receive(parts[peer].narrow(0, 0, length(own, i)), peer, static_cast<int>(i)));
      }
    };
    if (own_parts > 0) post_receives(0);
    int64_t most = *std::max_element(counts.begin(), counts.end());
    for (int64_t i = 0; i * part < most; ++i) {
      for (int peer = 0; peer < size_; ++peer) {
        if (peer == rank_ || i * part >= counts[peer]) continue;
        wire_.send(flat.narrow(0, offsets[peer] + i * part, length(counts[peer], i)), peer,
                   static_cast<int>(i));
      }
    }
    std::exception_ptr
        consumer_failed;  // thrown at the end: the other ranks still need this rank's data
    for (int64_t i = 0; i < own_parts; ++i) {
      if (i + 1 < own_parts) post_receives(i + 1);
      for (const auto ticket : receives[i % 2]) wire_.wait(ticket);
      const auto mine = flat.narrow(0, offsets[rank_] + i * part, length(own, i));
      auto parts = scratch[i % 2].narrow(1, 0, length(own, i));
      parts[rank_].copy_(mine);
      const auto sum = sum_rows(parts, scale);
      if (!consume) {
        mine.copy_(sum);
      } else if (!consumer_failed) {
        try {
          (*consume)(i * part, sum);
        } catch (...) {
          consumer_failed = std::current_exception();
        }
      }
    }
    wire_.finish();
    if (consumer_failed) std::rethrow_exception(consumer_failed);
  }

  Messenger wire_;
  int rank_, size_;
  std::vector<int> all_;  // 0 … size - 1
};

}  // namespace

std::unique_ptr<Transport> make_p2p_transport(const World& world,
                                              std::unique_ptr<Mailbox> mailbox) {
  return std::make_unique<P2pTransport>(world, std::move(mailbox));
}

}  // namespace tessera::comm
