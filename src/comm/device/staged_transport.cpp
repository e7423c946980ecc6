#include "comm/device/staged_transport.h"

#include <utility>

#include "comm/base/flat_tensor.h"
#include "comm/device/pinned_buffers.h"

namespace tessera::comm {
namespace {

class StagedTransport : public TransportOver {
 public:
  StagedTransport(int rank, at::DeviceType type, std::unique_ptr<Transport> host)
      : TransportOver(std::move(host)), rank_(rank), type_(type) {}

  at::DeviceType device_type() const override { return type_; }
  bool waits_for_device() const override { return true; }

  void all_reduce(at::Tensor flat, double scale) override {
    if (flat.is_cpu()) return inner_->all_reduce(flat, scale);
    const auto staged = copy_of(flat);
    inner_->all_reduce(staged, scale);
    buffers_.send(staged, flat);
  }

  void reduce(at::Tensor flat, int root) override {
    if (flat.is_cpu()) return inner_->reduce(flat, root);
    const auto staged = copy_of(flat);
    inner_->reduce(staged, root);
    if (rank_ == root) buffers_.send(staged, flat);
  }

  void broadcast(at::Tensor flat, int root) override {
    if (flat.is_cpu()) return inner_->broadcast(flat, root);
    const auto staged = rank_ == root ? copy_of(flat) : empty(flat.numel(), flat);
    inner_->broadcast(staged, root);
    if (rank_ != root) buffers_.send(staged, flat);
  }

  void all_gather(at::Tensor flat, const Counts& counts) override {
    if (flat.is_cpu()) return inner_->all_gather(flat, counts);
    const auto staged = empty(flat.numel(), flat);
    segment_of(staged, counts, rank_).copy_(segment_of(flat, counts, rank_));
    inner_->all_gather(staged, counts);
    buffers_.send(staged, flat);
  }

  void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) override {
    if (flat.is_cpu()) return inner_->reduce_scatter(flat, counts, target);
    const auto staged = copy_of(flat), received = segment_of(staged, counts, rank_);
    inner_->reduce_scatter(staged, counts, {target.scale});
    if (received.numel() == 0) return;
    const auto sum = target.consume            ? at::empty(received.sizes(), flat.options())
                     : target.output.defined() ? target.output
                                               : segment_of(flat, counts, rank_);
    buffers_.send(received, sum);
    if (target.consume) (*target.consume)(0, sum);
  }

  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override {
    if (input.is_cpu()) return inner_->all_to_all(output, input, recv_counts, send_counts);
    const auto staged = copy_of(input), received = buffers_.take(output.numel(), output);
    inner_->all_to_all(received, staged, recv_counts, send_counts);
    if (output.numel() > 0) buffers_.send(received, output);
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
  PinnedBuffers buffers_;
};

}  // namespace

std::unique_ptr<Transport> make_staged_transport(int rank, at::DeviceType type,
                                                 std::unique_ptr<Transport> host) {
  return std::make_unique<StagedTransport>(rank, type, std::move(host));
}

}  // namespace tessera::comm
