#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

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
  split,
  fail
};

const char* op_name(Op op);

/// What every rank tells every other before data moves. Plain bytes: it travels through any
/// transport as it is.
struct OpHeader {
  uint64_t sequence = 0;  ///< Number of the collective in its group, from 1.
  uint64_t detail = 0;    ///< Hash of counts and whatever else must agree.
  int64_t numel = 0;
  int32_t root = -1;
  Op op = Op::barrier;
  int8_t dtype = 0;        ///< at::ScalarType
  uint8_t free_numel = 0;  ///< 1: numel may differ between ranks (bytes, gathers of unequal sizes).
  uint8_t unused = 0;
};
static_assert(sizeof(OpHeader) == 32);

/// "all_reduce #7 of 1000 float32" for messages.
std::string describe(const OpHeader& header);

/// What moves the data of one group of two or more ranks. Calls block, come from one thread at a
/// time, in the same order with the same arguments on all ranks (ProcessGroup has checked that with
/// exchange()), and take contiguous tensors. Sums are in rank order: ((x0 + x1) + x2) + …; 16-bit
/// floats are summed in float and rounded once; `scale` multiplies the finished sum. Failure:
/// BrokenWorldError that names the rank to blame; the transport is unusable afterwards.
class Transport {
 public:
  using ConsumeRun = ProcessGroup::ConsumeRun;

  virtual ~Transport() = default;
  virtual const char* name() const = 0;

  /// All ranks' headers, in rank order. Also a barrier: nobody returns before everybody has called.
  virtual std::vector<OpHeader> exchange(const OpHeader& mine) = 0;

  virtual void all_reduce(at::Tensor flat, double scale) = 0;
  virtual void reduce(at::Tensor flat, int root) = 0;
  virtual void broadcast(at::Tensor flat, int root) = 0;
  virtual void all_gather(at::Tensor flat, const std::vector<int64_t>& counts) = 0;
  /// With `consume`, flat is left as it is and the sums go to it, in ascending runs; without, to
  /// own segment of flat.
  virtual void reduce_scatter(at::Tensor flat, const std::vector<int64_t>& counts,
                              const ConsumeRun* consume) = 0;
  /// flat is left as it is; own segment's sum, times `scale`, goes to `output`.
  virtual void reduce_scatter_into(at::Tensor flat, const std::vector<int64_t>& counts,
                                   at::Tensor output, double scale);
  virtual void all_to_all(at::Tensor output, at::Tensor input,
                          const std::vector<int64_t>& recv_counts,
                          const std::vector<int64_t>& send_counts) = 0;

  /// Memory that peers can read in place, or (`common`) one memory for all; undefined where the
  /// transport has none. Zero-filled.
  virtual at::Tensor allocate(int64_t numel, at::TensorOptions options, bool common) { return {}; }
  virtual at::Tensor peer_view(const at::Tensor& allocated, int peer) const { return {}; }

  /// True when operations are ordered on a device stream and so are issued from the caller's
  /// thread, never queued.
  virtual bool stream_ordered() const { return false; }
  virtual void set_timeout(std::chrono::milliseconds timeout) = 0;
  /// From any thread: makes a blocked call, and every later one, throw BrokenWorldError soon.
  virtual void abort() noexcept = 0;
};

/// `accumulator += addend`, the one way sums are taken. Same shape and dtype.
void add_in_place(at::Tensor& accumulator, const at::Tensor& addend);

}  // namespace tessera::comm
