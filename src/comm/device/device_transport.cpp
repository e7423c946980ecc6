#include "comm/device/device_transport.h"

#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/base/device_backend.h"
#include "comm/base/flat_tensor.h"
#include "comm/base/tree_sum.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#if TESSERA_TORCH_AT_LEAST(2, 0)
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif

namespace tessera::comm {
namespace {

using C10dWork = c10::intrusive_ptr<c10d::Work>;

/// Sums are taken locally after an all-to-all, to keep them in the order of tree_sum.h.
class DeviceTransport : public TransportOver {
 public:
  DeviceTransport(const World& world, std::unique_ptr<Transport> control)
      : TransportOver(std::move(control)),
        rank_(world.rank),
        size_(world.size),
        device_(world.device),
        backend_(device_->connect(world)) {}

  const char* name() const override { return device_->name.c_str(); }
  at::DeviceType device_type() const override { return device_->type; }
  void abort() noexcept override {
    inner_->abort();
    abort_device();
  }
  void abort_device() noexcept override { device_->abort(*backend_); }
  std::string device_identity(at::Device device) const override {
    return device_->identity ? device_->identity(device) : "";
  }

  void all_reduce(at::Tensor flat, double scale) override {
    if (flat.is_cpu()) return inner_->all_reduce(flat, scale);
    const auto counts = even_counts(flat.numel(), size_);
    reduce_scatter(flat, counts, {scale});
    all_gather(flat, counts);
  }

  void reduce(at::Tensor flat, int root) override {
    if (flat.is_cpu()) return inner_->reduce(flat, root);
    Counts counts(size_, 0);
    counts[root] = flat.numel();
    reduce_scatter(flat, counts, {});
  }

  void broadcast(at::Tensor flat, int root) override {
    if (flat.is_cpu()) return inner_->broadcast(flat, root);
    finish("broadcast", {broadcast_from(flat, root)});
  }

  void all_gather(at::Tensor flat, const Counts& counts) override {
    if (flat.is_cpu()) return inner_->all_gather(flat, counts);
    std::vector<C10dWork> works;
    for (int r = 0; r < size_; ++r)
      if (counts[r] > 0) works.push_back(broadcast_from(segment_of(flat, counts, r), r));
    finish("all_gather", works);
  }

  void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) override {
    if (flat.is_cpu()) return inner_->reduce_scatter(flat, counts, target);
    const int64_t own = counts[rank_];
    auto parts = at::empty({size_ * own}, flat.options());
    all_to_all(parts, flat, Counts(size_, own), counts);
    if (own == 0) return;
    const auto sum = sum_rows(parts.view({size_, own}), target.scale);
    if (target.consume) return (*target.consume)(0, sum);
    const auto segment = segment_of(flat, counts, rank_);
    (target.output.defined() ? target.output : segment).copy_(sum);
  }

  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override {
    if (input.is_cpu()) return inner_->all_to_all(output, input, recv_counts, send_counts);
    connect_beside(input);
    auto receive = recv_counts, send = send_counts;
    finish("all_to_all", {guarded("all_to_all", [&] {
             return compat::all_to_all_flat(*backend_, output, input, receive, send);
           })});
  }

 private:
  /// NCCL connects the ranks when they first broadcast, and when they first send to each other, and
  /// the host waits for them there. All of it happens in the first collective.
  void connect_beside(const at::Tensor& tensor) {
    if (std::exchange(connected_, true)) return;
    const auto from = at::zeros({size_}, tensor.options()), to = at::zeros_like(from);
    all_to_all(to, from, Counts(size_, 1), Counts(size_, 1));
    broadcast(to, 0);
  }

  /// Errors of the backend become ours.
  template <class Call>
  C10dWork guarded(const char* what, Call&& call) {
    try {
      return call();
    } catch (const std::exception& error) {
      throw BrokenWorldError(
          fmt::format("ProcessGroup: rank {} of {}: {} through {} failed: {}", rank_, size_, what,
                      device_->name, compat::first_line(error.what())),
          {});
    }
  }

  C10dWork broadcast_from(at::Tensor tensor, int root) {
    connect_beside(tensor);
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return guarded("broadcast", [&] { return backend_->broadcast(tensors, options); });
  }

  /// Work that is issued on the current stream from now on runs after these.
  void finish(const char* what, const std::vector<C10dWork>& works) {
    for (const auto& work : works) {
      guarded(what, [&] {
        work->wait();
        return work;
      });
    }
  }

  int rank_, size_;
  std::shared_ptr<const DeviceBackend> device_;
  c10::intrusive_ptr<compat::C10dBackend> backend_;
  bool connected_ = false;
};

}  // namespace

std::unique_ptr<Transport> make_device_transport(const World& world,
                                                 std::unique_ptr<Transport> control) {
  World place = world;
  place.store = c10::make_intrusive<c10d::PrefixStore>("device/", world.store);
  try {
    return std::make_unique<DeviceTransport>(place, std::move(control));
  } catch (const std::exception& error) {
    throw BrokenWorldError(
        fmt::format("ProcessGroup: rank {} of {} could not connect to the other ranks through {}: "
                    "{}",
                    world.rank, world.size, world.device->name, compat::first_line(error.what())),
        {});
  }
}

}  // namespace tessera::comm
