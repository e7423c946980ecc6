#include "comm/device/device_transport.h"

#include <algorithm>
#include <functional>
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

bool all_equal(const Counts& counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

using C10dWork = c10::intrusive_ptr<c10d::Work>;

/// A mean in the words of a backend: the operation, and factors around it.
struct BackendSum {
  c10d::ReduceOp::RedOpType operation = c10d::ReduceOp::SUM;
  double before = 1, after = 1;

  BackendSum(at::ScalarType dtype, double scale, int ranks) {
    if (scale == 1) return;
    if (at::isFloatingType(dtype) && scale == 1.0 / ranks) operation = c10d::ReduceOp::AVG;
    else (is_narrow(dtype) ? before : after) = scale;  // a narrow sum may be out of range
  }
};

/// Sums are those of the backend. With ProcessGroupOptions::deterministic they are taken locally
/// after an all-to-all, in the order of tree_sum.h.
class DeviceTransport : public TransportOver {
 public:
  DeviceTransport(const World& world, std::unique_ptr<Transport> control)
      : TransportOver(std::move(control)),
        rank_(world.rank),
        size_(world.size),
        fixed_order_(world.options.deterministic),
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
    if (!fixed_order_) return all_reduce_by_backend(flat, scale);
    const auto counts = even_counts(flat.numel(), size_);
    reduce_scatter(flat, counts, {scale});
    all_gather(flat, counts);
  }

  void reduce(at::Tensor flat, int root) override {
    if (flat.is_cpu()) return inner_->reduce(flat, root);
    if (!fixed_order_) return finish("reduce", {reduce_to(root, flat, c10d::ReduceOp::SUM)});
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
    if (flat.numel() > 0 && all_equal(counts)) {
      connect_beside(flat);
      auto own = segment_of(flat, counts, rank_);
      return finish("all_gather",
                    {guarded("all_gather", [&] { return backend_->_allgather_base(flat, own); })});
    }
    std::vector<C10dWork> works;
    for (int r = 0; r < size_; ++r)
      if (counts[r] > 0) works.push_back(broadcast_from(segment_of(flat, counts, r), r));
    finish("all_gather", works);
  }

  void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) override {
    if (flat.is_cpu()) return inner_->reduce_scatter(flat, counts, target);
    if (!fixed_order_) return reduce_scatter_by_backend(flat, counts, target);
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
  /// NCCL connects the ranks when they first broadcast, when they first send to each other, and for
  /// each algorithm of a sum, and the host waits for them there. All of it happens in the first
  /// collective.
  void connect_beside(const at::Tensor& tensor) {
    if (std::exchange(connected_, true)) return;
    const auto from = at::zeros({size_}, tensor.options()), to = at::zeros_like(from);
    all_to_all(to, from, Counts(size_, 1), Counts(size_, 1));
    broadcast(to, 0);
    if (!fixed_order_) all_reduce(to, 1);
  }

  void all_reduce_by_backend(at::Tensor flat, double scale) {
    if (flat.numel() == 0) return;
    connect_beside(flat);
    const BackendSum sum(flat.scalar_type(), scale, size_);
    if (sum.before != 1) flat.mul_(sum.before);
    c10d::AllreduceOptions options;
    options.reduceOp = sum.operation;
    std::vector<at::Tensor> tensors{flat};
    finish("all_reduce",
           {guarded("all_reduce", [&] { return backend_->allreduce(tensors, options); })});
    if (sum.after != 1) flat.mul_(sum.after);
  }

  /// `tensor` changes on the root alone.
  C10dWork reduce_to(int root, at::Tensor tensor, c10d::ReduceOp::RedOpType operation) {
    connect_beside(tensor);
    c10d::ReduceOptions options;
    options.rootRank = root;
    options.reduceOp = operation;
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return guarded("reduce", [&] { return backend_->reduce(tensors, options); });
  }

  /// Segments of equal lengths are one call of the backend, others one for each rank.
  void reduce_scatter_by_backend(const at::Tensor& flat, const Counts& counts,
                                 const Target& target) {
    if (flat.numel() == 0) return;
    const BackendSum sum(flat.scalar_type(), target.scale, size_);
    auto input = sum.before != 1 ? flat.mul(sum.before) : flat;
    const auto own = segment_of(input, counts, rank_);
    auto output = target.consume            ? at::empty_like(own)
                  : target.output.defined() ? target.output
                                            : segment_of(flat, counts, rank_);
    connect_beside(flat);
    if (all_equal(counts)) {
      c10d::ReduceScatterOptions options;
      options.reduceOp = sum.operation;
      finish("reduce_scatter", {guarded("reduce_scatter", [&] {
               return backend_->_reduce_scatter_base(output, input, options);
             })});
    } else {
      if (data_of(output) != data_of(own)) output.copy_(own);  // also within one allocation
      std::vector<C10dWork> works;
      for (int r = 0; r < size_; ++r) {
        const auto part = r == rank_ ? output : segment_of(input, counts, r);
        if (counts[r] > 0) works.push_back(reduce_to(r, part, sum.operation));
      }
      finish("reduce_scatter", works);
    }
    if (output.numel() == 0) return;
    if (sum.after != 1) output.mul_(sum.after);
    if (target.consume) (*target.consume)(0, output);
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
  bool fixed_order_;
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
