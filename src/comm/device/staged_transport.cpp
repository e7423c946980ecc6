#include "comm/device/staged_transport.h"

#include <utility>

#include "comm/base/flat_tensor.h"
#include "comm/device/pinned_buffers.h"

namespace tessera::comm {
namespace {

class StagedTransport : public Transport {
 public:
  StagedTransport(int rank, at::DeviceType type, std::unique_ptr<Transport> host)
      : rank_(rank), type_(type), host_(std::move(host)) {}

  const char* name() const override { return host_->name(); }
  at::DeviceType device_type() const override { return type_; }
  bool waits_for_device() const override { return true; }
  void set_timeout(std::chrono::milliseconds timeout) override { host_->set_timeout(timeout); }
  void set_stopped_timeout(std::chrono::milliseconds timeout) override {
    host_->set_stopped_timeout(timeout);
  }
  void abort() noexcept override { host_->abort(); }
  Sent sent() const override { return host_->sent(); }
  std::vector<OpHeader> exchange(const OpHeader& mine) override { return host_->exchange(mine); }

  void all_reduce(at::Tensor flat, double scale) override {
    if (flat.is_cpu()) return host_->all_reduce(flat, scale);
    const auto staged = copy_of(flat);
    host_->all_reduce(staged, scale);
    buffers_.send(staged, flat);
  }

  void reduce(at::Tensor flat, int root) override {
    if (flat.is_cpu()) return host_->reduce(flat, root);
    const auto staged = copy_of(flat);
    host_->reduce(staged, root);
    if (rank_ == root) buffers_.send(staged, flat);
  }

  void broadcast(at::Tensor flat, int root) override {
    if (flat.is_cpu()) return host_->broadcast(flat, root);
    const auto staged = rank_ == root ? copy_of(flat) : empty(flat.numel(), flat);
    host_->broadcast(staged, root);
    if (rank_ != root) buffers_.send(staged, flat);
  }

  void all_gather(at::Tensor flat, const Counts& counts) override {
    if (flat.is_cpu()) return host_->all_gather(flat, counts);
    const auto staged = empty(flat.numel(), flat);
    segment_of(staged, counts, rank_).copy_(segment_of(flat, counts, rank_));
    host_->all_gather(staged, counts);
    buffers_.send(staged, flat);
  }

  void reduce_scatter(at::Tensor flat, const Counts& counts, double scale,
                      const ConsumeRun* consume) override {
    if (flat.is_cpu()) return host_->reduce_scatter(flat, counts, scale, consume);
    const auto staged = copy_of(flat);
    host_->reduce_scatter(staged, counts, scale, nullptr);
    if (counts[rank_] == 0) return;
    const auto sum =
        consume ? at::empty({counts[rank_]}, flat.options()) : segment_of(flat, counts, rank_);
    buffers_.send(segment_of(staged, counts, rank_), sum);
    if (consume) (*consume)(0, sum);
  }

  void reduce_scatter_into(at::Tensor flat, const Counts& counts, at::Tensor output,
                           double scale) override {
    if (flat.is_cpu()) return host_->reduce_scatter_into(flat, counts, output, scale);
    const auto staged = copy_of(flat), sum = buffers_.take(output.numel(), output);
    host_->reduce_scatter_into(staged, counts, sum, scale);
    if (output.numel() > 0) buffers_.send(sum, output);
  }

  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override {
    if (input.is_cpu()) return host_->all_to_all(output, input, recv_counts, send_counts);
    const auto staged = copy_of(input), received = buffers_.take(output.numel(), output);
    host_->all_to_all(received, staged, recv_counts, send_counts);
    if (output.numel() > 0) buffers_.send(received, output);
  }

  at::Tensor allocate(int64_t numel, at::TensorOptions options, bool common) override {
    return options.device().is_cpu() ? host_->allocate(numel, options, common) : at::Tensor();
  }
  at::Tensor peer_view(const at::Tensor& allocated, int peer) const override {
    return allocated.is_cpu() ? host_->peer_view(allocated, peer) : at::Tensor();
  }

 private:
  /// The first buffer of a collective. What an earlier one has left, perhaps after an error, is
  /// free.
  at::Tensor empty(int64_t numel, const at::Tensor& like) {
    buffers_.clear();
    return buffers_.take(numel, like);
  }
  at::Tensor copy_of(const at::Tensor& flat) {
    const auto staged = empty(flat.numel(), flat);
    staged.copy_(flat);  // the host waits for the current stream
    return staged;
  }
  int rank_;
  at::DeviceType type_;
  std::unique_ptr<Transport> host_;
  PinnedBuffers buffers_;
};

}  // namespace

std::unique_ptr<Transport> make_staged_transport(int rank, at::DeviceType type,
                                                 std::unique_ptr<Transport> host) {
  return std::make_unique<StagedTransport>(rank, type, std::move(host));
}

}  // namespace tessera::comm
