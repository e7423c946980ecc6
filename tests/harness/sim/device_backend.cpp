#include "harness/sim/device_backend.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/base/transport.h"
#include "comm/group/make_transport.h"
#include "harness/sim/sim.h"
#include "harness/sim/streams.h"
#if TESSERA_TORCH_AT_LEAST(2, 0)
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif

namespace tessera::sim {
namespace {

std::atomic<uint64_t> calls = 0;

class SimWork : public c10d::Work {
 public:
  SimWork(c10::Event end, int device) : end_(std::move(end)), device_(device) {}
  bool isCompleted() override { return end_.query(); }
  bool wait(std::chrono::milliseconds) override {
    end_.block(current_stream(device_));
    return true;
  }

 private:
  c10::Event end_;
  int device_;
};

/// Carries the data. Kernels share it, because they may run after the backend has gone.
class Wire {
 public:
  explicit Wire(std::unique_ptr<comm::Transport> transport) : transport_(std::move(transport)) {}
  void abort() noexcept {
    aborted_ = true;
    transport_->abort();
  }
  /// Runs a collective. After abort() its data is undefined and its error is dropped. As NCCL's,
  /// one whose other ranks have gone does not end before.
  template <class Collective>
  void run(const Collective& collective) {
    try {
      collective(*transport_);
    } catch (const std::exception&) {
      while (!aborted_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::unique_ptr<comm::Transport> transport_;
  std::atomic<bool> aborted_ = false;
};

class SimBackend : public compat::C10dBackend {
 public:
  explicit SimBackend(const comm::World& world)
      : compat::C10dBackend(world.rank, world.size),
        wire_(std::make_shared<Wire>(connect_on_cpu(world))),
        device_(c10::impl::VirtualGuardImpl(kType).getDevice().index()),
        stream_(next_stream(device_)) {}
  /// As NCCL's, it ends what its stream still waits for.
  ~SimBackend() override { wire_->abort(); }

  const std::string getBackendName() const override { return "sim"; }
  void abort_wire() { wire_->abort(); }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options = c10d::BroadcastOptions()) override {
    check(tensors.at(0));
    const auto root = static_cast<int>(options.rootRank);
    return enqueue([flat = kernel_view(tensors[0]), root](comm::Transport& wire) {
      wire.broadcast(flat, root);
    });
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& receive,
      std::vector<int64_t>& send, const c10d::AllToAllOptions& = c10d::AllToAllOptions()) override {
    check(output);
    check(input);
    const auto to = kernel_view(output), from = kernel_view(input);
    return enqueue([to, from, receive, send](comm::Transport& wire) {
      wire.all_to_all(to, from, receive, send);
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options = c10d::AllreduceOptions()) override {
    check(tensors.at(0));
    const auto flat = kernel_view(tensors[0]);
    return enqueue([sum = ring_sum(flat, options.reduceOp), flat](comm::Transport& wire) {
      const auto result = sum(wire);
      flat.copy_(result);
    });
  }

  c10::intrusive_ptr<c10d::Work> reduce(
      std::vector<at::Tensor>& tensors,
      const c10d::ReduceOptions& options = c10d::ReduceOptions()) override {
    check(tensors.at(0));
    const auto flat = kernel_view(tensors[0]);
    const bool here = options.rootRank == getRank();
    return enqueue([sum = ring_sum(flat, options.reduceOp), flat, here](comm::Transport& wire) {
      const auto result = sum(wire);
      if (here) flat.copy_(result);
    });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions& = c10d::AllgatherOptions()) override {
    check(output);
    check(input);
    TORCH_CHECK(output.numel() == input.numel() * getSize(), "sim: sizes of an all-gather");
    const auto to = kernel_view(output), from = kernel_view(input);
    return enqueue([to, from, rank = getRank(), size = getSize()](comm::Transport& wire) {
      to.narrow(0, rank * from.numel(), from.numel()).copy_(from);
      wire.all_gather(to, comm::Counts(size, from.numel()));
    });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options = c10d::ReduceScatterOptions()) override {
    check(output);
    check(input);
    TORCH_CHECK(input.numel() == output.numel() * getSize(), "sim: sizes of a reduce-scatter");
    const auto to = kernel_view(output), from = kernel_view(input);
    return enqueue(
        [sum = ring_sum(from, options.reduceOp), to, rank = getRank()](comm::Transport& wire) {
          to.copy_(sum(wire).narrow(0, rank * to.numel(), to.numel()));
        });
  }

 private:
  /// Computes the sum or mean of all ranks' `flat` as NCCL's ring does: the values of segment p are
  /// added from rank p + 1 on, in the dtype of `flat`.
  std::function<at::Tensor(comm::Transport&)> ring_sum(const at::Tensor& flat,
                                                       const c10d::ReduceOp& operation) const {
    const bool mean = operation == c10d::ReduceOp::AVG;
    TORCH_CHECK(mean || operation == c10d::ReduceOp::SUM, "sim: expected a sum or a mean");
    return [flat, mean, rank = getRank(), size = getSize()](comm::Transport& wire) {
      const int64_t numel = flat.numel();
      auto rows = at::empty({size, numel}, flat.options());
      rows[rank].copy_(flat);
      wire.all_gather(rows.view({-1}), comm::Counts(size, numel));
      if (mean) rows.mul_(1.0 / size);
      const auto counts = comm::even_counts(numel, size);
      auto sum = at::empty_like(flat);
      for (int p = 0; p < size; ++p) {
        auto part = comm::segment_of(sum, counts, p);
        part.copy_(comm::segment_of(rows[(p + 1) % size], counts, p));
        for (int step = 2; step <= size; ++step)
          part.add_(comm::segment_of(rows[(p + step) % size], counts, p));
      }
      return sum;
    };
  }

  static std::unique_ptr<comm::Transport> connect_on_cpu(comm::World world) {
    world.device = nullptr;
    return comm::make_transport(world);
  }

  void check(const at::Tensor& tensor) const {
    TORCH_CHECK(tensor.device() == device(device_), "sim: expected a tensor on ", device(device_),
                ", but found one on ", tensor.device());
  }

  c10::intrusive_ptr<c10d::Work> enqueue(std::function<void(comm::Transport&)> collective) {
    ++calls;
    c10::Event before(kType), end(kType);
    before.record(current_stream(device_));
    before.block(stream_);
    sim::enqueue(stream_,
                 [wire = wire_, collective = std::move(collective)] { wire->run(collective); });
    end.record(stream_);
    return c10::make_intrusive<SimWork>(std::move(end), device_);
  }

  std::shared_ptr<Wire> wire_;
  int device_;
  c10::Stream stream_;
};

}  // namespace

uint64_t backend_calls() { return calls; }

std::shared_ptr<const comm::DeviceBackend> device_backend(bool exclusive, bool can_abort) {
  const auto connect = [](const comm::World& world) -> c10::intrusive_ptr<compat::C10dBackend> {
    return c10::make_intrusive<SimBackend>(world);
  };
  const auto abort = [can_abort](compat::C10dBackend& backend) {
    if (can_abort) static_cast<SimBackend&>(backend).abort_wire();
  };
  const auto identity = [exclusive](at::Device device) {
    return exclusive ? device.str() : std::string();
  };
  return std::make_shared<const comm::DeviceBackend>(
      comm::DeviceBackend{kType, "sim", connect, abort, identity});
}

}  // namespace tessera::sim
