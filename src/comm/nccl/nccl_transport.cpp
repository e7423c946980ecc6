#include "comm/nccl/nccl_transport.h"

#include <cstring>
#include <numeric>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// Collectives on CUDA tensors, one device for each rank, ordered on NCCL's streams. Only
/// exchange() blocks the host. Sums are taken locally after an all-to-all, to keep them in rank
/// order.
class NcclTransport : public Transport {
 public:
  explicit NcclTransport(const World& world) : rank_(world.rank), size_(world.size) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = world.options.timeout;
    backend_ = c10::make_intrusive<c10d::ProcessGroupNCCL>(world.store, rank_, size_, options);
  }

  const char* name() const override { return "nccl"; }
  bool stream_ordered() const override { return true; }
  /// No effect: NCCL's watchdog keeps the time-out given at construction.
  void set_timeout(std::chrono::milliseconds) override {}
  void abort() noexcept override {}

  std::vector<OpHeader> exchange(const OpHeader& mine) override {
    const auto width = static_cast<int64_t>(sizeof(OpHeader));
    auto own = at::empty({width}, at::kByte);
    std::memcpy(own.data_ptr(), &mine, sizeof(OpHeader));
    auto table = at::empty({size_ * width}, at::TensorOptions().dtype(at::kByte).device(at::kCUDA));
    table.narrow(0, rank_ * width, width).copy_(own);
    all_gather(table, std::vector<int64_t>(size_, width));
    const auto host = table.cpu();
    std::vector<OpHeader> headers(size_);
    std::memcpy(headers.data(), host.data_ptr(), headers.size() * sizeof(OpHeader));
    return headers;
  }

  void all_reduce(at::Tensor flat, double scale) override {
    std::vector<int64_t> counts(size_, flat.numel() / size_);
    for (int r = 0; r < flat.numel() % size_; ++r) ++counts[r];
    reduce_scatter(flat, counts, nullptr);
    if (scale != 1) segment(flat, counts, rank_).mul_(scale);
    all_gather(flat, counts);
  }

  void reduce(at::Tensor flat, int root) override {
    std::vector<int64_t> counts(size_, 0);
    counts[root] = flat.numel();
    reduce_scatter(flat, counts, nullptr);
  }

  void broadcast(at::Tensor flat, int root) override { broadcast_from(flat, root)->wait(); }

  void all_gather(at::Tensor flat, const std::vector<int64_t>& counts) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int r = 0; r < size_; ++r) {
      if (counts[r] > 0) works.push_back(broadcast_from(segment(flat, counts, r), r));
    }
    for (auto& work : works) work->wait();
  }

  void reduce_scatter(at::Tensor flat, const std::vector<int64_t>& counts,
                      const ConsumeRun* consume) override {
    const int64_t own = counts[rank_];
    auto parts = at::empty({size_ * own}, flat.options());
    all_to_all(parts, flat, std::vector<int64_t>(size_, own), counts);
    if (own == 0) return;
    const auto sum = sum_rows(parts.view({size_, own}));
    if (consume) (*consume)(0, sum);
    else segment(flat, counts, rank_).copy_(sum);
  }

  void all_to_all(at::Tensor output, at::Tensor input, const std::vector<int64_t>& recv_counts,
                  const std::vector<int64_t>& send_counts) override {
    auto receive = recv_counts, send = send_counts;
    compat::all_to_all_flat(*backend_, output, input, receive, send)->wait();
  }

 private:
  static at::Tensor segment(const at::Tensor& flat, const std::vector<int64_t>& counts, int r) {
    return flat.narrow(0, std::accumulate(counts.begin(), counts.begin() + r, int64_t{0}),
                       counts[r]);
  }

  c10::intrusive_ptr<c10d::Work> broadcast_from(at::Tensor tensor, int root) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return backend_->broadcast(tensors, options);
  }

  int rank_, size_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> backend_;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(const World& world) {
  if (!at::globalContext().hasCUDA()) {
    throw UsageError(fmt::format(
        "ProcessGroup: backend NCCL: rank {} of {} sees no CUDA device; expected one for "
        "each rank, or backend Gloo",
        world.rank, world.size));
  }
  try {
    return std::make_unique<NcclTransport>(world);
  } catch (const std::exception& error) {
    throw BrokenWorldError(
        fmt::format(
            "ProcessGroup: rank {} of {} could not connect to the other ranks through NCCL: {}",
            world.rank, world.size, compat::first_line(error.what())),
        {});
  }
}

}  // namespace tessera::comm
