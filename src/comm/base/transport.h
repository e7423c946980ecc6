#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/flat_tensor.h"
#include "comm/base/wire_codec.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

namespace tessera::comm {

enum class Op : uint8_t {
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  barrier,
  bytes,
  allocate,
  number,
  split,
  fail
};

const char* op_name(Op op);

/// Describes a collective. Every rank sends its header to every other rank before data moves.
/// Trivially copyable: transports send its bytes.
struct OpHeader {
  uint64_t sequence = 0;  ///< Number of the collective in its group, from 1.
  uint64_t detail = 0;    ///< Hash of the counts and of other values that must be equal.
  int64_t numel = 0;      ///< The value that Op::number and Op::split exchange.
  int32_t root = -1;
  Op op = Op::barrier;
  int8_t dtype = 0;  ///< at::ScalarType
  /// 1: numel may differ between ranks (bytes, gathers of unequal sizes).
  uint8_t free_numel : 1 = 0;
  uint8_t may_diverge : 1 = 0;  ///< 1: see DivergenceScope.
  uint8_t on_device = 0;        ///< 1: the tensors are on the accelerator of the group.
};
static_assert(sizeof(OpHeader) == 32);

/// "all_reduce #7 of 1000 Float", for messages.
std::string describe(const OpHeader& header);

/// Thrown on every rank, with the same text, when a collective had a wrong result on some rank.
class WrongResult : public Error {
 public:
  using Error::Error;
};

/// Moves the data of one group of two or more ranks. Calls block and take contiguous tensors. All
/// ranks make the same calls in the same order with the same arguments, from one thread at a time;
/// ProcessGroup checks this with exchange(). Sums are in the order of tree_sum.h; 16-bit
/// floats are summed in float and rounded once; `scale` multiplies the finished sum before it is
/// rounded. A failure throws BrokenWorldError naming the rank to blame, and the transport is
/// unusable afterwards.
class Transport {
 public:
  using ConsumeRun = ProcessGroup::ConsumeRun;

  virtual ~Transport() = default;
  virtual const char* name() const = 0;

  /// Returns all ranks' headers in rank order. Also a barrier: returns when all ranks have called.
  virtual std::vector<OpHeader> exchange(const OpHeader& mine) = 0;

  virtual void all_reduce(at::Tensor flat, double scale) = 0;
  virtual void reduce(at::Tensor flat, int root) = 0;
  virtual void broadcast(at::Tensor flat, int root) = 0;
  virtual void all_gather(at::Tensor flat, const Counts& counts) = 0;
  /// The destination of the sums of this rank's segment, times `scale`: `consume`, in ascending
  /// runs, else `output`, else the segment itself, which is the only part of `flat` that changes.
  struct Target {
    double scale = 1;
    const ConsumeRun* consume = nullptr;
    at::Tensor output = {};
  };
  virtual void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) = 0;
  virtual void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                          const Counts& send_counts) = 0;

  /// Zero-filled memory that peers can read in place or, if `common`, memory that all ranks have in
  /// common. Undefined if the transport does not support it.
  virtual at::Tensor allocate(int64_t numel, at::TensorOptions options, bool common) { return {}; }
  virtual at::Tensor peer_view(const at::Tensor& allocated, int peer) const { return {}; }

  /// For the next collective only: error feedback, in a group of ProcessGroup::with_wire(). Null:
  /// none.
  virtual void set_feedback(WireFeedback*) {}

  /// The bytes that this rank has sent in messages between ranks, since the transport was made.
  /// Memory that ranks share and traffic of a device's backend are not counted.
  struct Sent {
    uint64_t messages = 0, bytes = 0;
  };
  virtual Sent sent() const { return {}; }

  /// The accelerator whose tensors this transport moves beside CPU tensors; CPU if there is none.
  /// Collectives on its tensors are issued from the caller's thread, are ordered on its current
  /// stream, and are never queued, unless waits_for_device().
  virtual at::DeviceType device_type() const { return at::kCPU; }
  /// True if a collective on the accelerator's tensors waits on the host for what is issued on the
  /// current stream, and uses the connections of CPU tensors. It then needs a turn too.
  virtual bool waits_for_device() const { return false; }
  /// Ends the collectives that wait on the accelerator, where its backend can.
  virtual void abort_device() noexcept {}
  /// See DeviceBackend::identity.
  virtual std::string device_identity(at::Device) const { return ""; }
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// For ranks whose processes are known to be stopped, or show the others nothing through the
  /// store. Used only where one of the two is known, and if shorter than the time-out.
  virtual void set_stopped_timeout(std::chrono::milliseconds) {}
  /// Makes a blocked call and every later call throw BrokenWorldError soon. From any thread.
  virtual void abort() noexcept = 0;
};

/// The bytes of every rank: sizes[r] of rank r. `mine`: the bytes of this rank, `rank`.
std::vector<std::string> gather_texts(Transport& transport, int rank, const std::string& mine,
                                      const Counts& sizes);

/// Wraps another transport. Derived classes override collectives; all other calls are passed on.
class TransportOver : public Transport {
 public:
  explicit TransportOver(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return inner_->name(); }
  std::vector<OpHeader> exchange(const OpHeader& mine) override { return inner_->exchange(mine); }
  at::Tensor allocate(int64_t numel, at::TensorOptions options, bool common) override {
    return inner_->allocate(numel, options, common);
  }
  at::Tensor peer_view(const at::Tensor& allocated, int peer) const override {
    return inner_->peer_view(allocated, peer);
  }
  Sent sent() const override { return inner_->sent(); }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  void set_stopped_timeout(std::chrono::milliseconds timeout) override {
    inner_->set_stopped_timeout(timeout);
  }
  void abort() noexcept override { inner_->abort(); }

 protected:
  std::unique_ptr<Transport> inner_;
};

}  // namespace tessera::comm
