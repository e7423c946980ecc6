#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace tessera {

/// Handle of an asynchronous collective. Cheap to copy; a default-constructed one is complete.
class Work {
 public:
  class State;

  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  /// Blocks until the collective is over. Throws what it threw (BrokenWorldError, UsageError), on
  /// every call. For CUDA tensors it makes the current stream wait, not the host.
  void wait();
  /// True when wait() would not block.
  bool done() const;

 private:
  std::shared_ptr<State> state_;
};

/// Traffic of one kind of collective, on this rank, since construction or reset_stats().
struct CollectiveStats {
  uint64_t calls = 0;
  /// Payload bytes that this rank sent to, or received from, other ranks. A reduce-scatter or an
  /// all-gather of N bytes in total counts (W-1)/W * N each way, an all-reduce 2 (W-1)/W * N,
  /// whatever carries them.
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

struct CommStats {
  CollectiveStats all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier,
      bytes;
  /// What the calling threads spent inside blocking collectives and in Work::wait(): for other
  /// ranks and for data. 0 where a device's stream waits instead.
  double waited_seconds = 0;

  /// Bytes received over all kinds but `bytes` (control messages).
  uint64_t payload_received() const;
  uint64_t payload_sent() const;
  uint64_t calls() const;
};

/// What moves the data. Auto: shared memory when all ranks of the group share a host and can map
/// each other's memory, else Gloo; a fall-back is logged once with its reason.
enum class Backend { Auto, SharedMemory, Gloo, NCCL, MPI };

struct ProcessGroupOptions {
  Backend backend = Backend::Auto;
  /// Bound of every wait: for peers at start-up, inside collectives, in barriers. Must be positive.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// Before each collective the ranks compare (sequence, operation, sizes, dtype); a difference is
  /// a UsageError on all of them before data moves. Off saves the latency of that exchange, and
  /// mismatches are no longer seen.
  bool check_collectives = true;
  /// Memory that is freed stays with the process instead of going back to the system and being
  /// touched afresh in the next step, which costs more than the work on it, and is found again:
  /// tensors on the CPU are allocated so that blocks of one size fit each other (glibc: M_MMAP_MAX
  /// 0, M_TRIM_THRESHOLD unbounded, and libtorch's allocator for CPUs, where it is its own, over
  /// malloc; for the whole process). A world of more than one.
  bool retain_freed_memory = true;
};

/// A value handle of a set of ranks that communicate. Copies share one state. A default-constructed
/// group is a world of one rank, in which every collective is a local no-op.
///
/// Unless said otherwise each member is a collective: all ranks of the group call it, in the same
/// order, from one thread at a time, and it blocks. Sums are taken in rank order, element by
/// element, whatever the transport: results are bit-identical across transports and algorithms.
/// Tensors may be empty, non-contiguous, and of any dtype for data movement; sums need a
/// floating-point or integral dtype (half types are summed in float and rounded once). Errors:
/// UsageError for a caller's mistake (on every rank, before data moves, when ranks disagree),
/// BrokenWorldError naming the missing rank when a peer dies, leaves or does not arrive within the
/// time-out.
class ProcessGroup {
 public:
  ProcessGroup();

  int rank() const;  ///< Of this process in the group, 0 <= rank < size. Local.
  int size() const;  ///< World size of the group. Local.
  const std::vector<int>& world_ranks()
      const;  ///< Ranks of the members in the group made at start-up. Local.
  std::chrono::milliseconds timeout() const;            ///< Local.
  void set_timeout(std::chrono::milliseconds timeout);  ///< Local; give every rank the same.
  /// "self", "shm", "gloo", "nccl", "mpi" or "c10d". Local.
  std::string backend_name() const;
  /// All ranks share one host (and may share memory). Local.
  bool same_host() const;

  /// Sum over ranks, times `scale` (rounded after the sum), in place, result on every rank.
  void all_reduce(at::Tensor tensor, double scale = 1);
  Work all_reduce_async(at::Tensor tensor, double scale = 1, const std::string& tag = "");
  /// Sum over ranks, result in place on `root`; other ranks' tensors are unchanged.
  void reduce(at::Tensor tensor, int root);
  Work reduce_async(at::Tensor tensor, int root);
  /// root's tensor, in place, on every rank.
  void broadcast(at::Tensor tensor, int root);
  Work broadcast_async(at::Tensor tensor, int root);
  /// Several tensors from one root, packed by dtype into few messages.
  void broadcast(std::vector<at::Tensor> tensors, int root);

  /// `flat` is cut into consecutive segments, one a rank, of `counts` elements (sum = numel; zeros
  /// are fine; the same on every rank). Own segment is the input, the whole is the output.
  void all_gather(at::Tensor flat, const std::vector<int64_t>& counts);
  /// `tag` says what it is for: ranks that say otherwise disagree, and the message names both. Up
  /// to 95 characters.
  Work all_gather_async(at::Tensor flat, const std::vector<int64_t>& counts,
                        const std::string& tag = "");
  /// As all_gather with each rank's `tensor` as input; returns the concatenation in rank order.
  /// Sizes may differ in size.
  at::Tensor all_gather(at::Tensor tensor);

  /// The reverse: own segment of `flat` becomes the sum over ranks of that segment. The other
  /// segments are unspecified afterwards.
  void reduce_scatter(at::Tensor flat, const std::vector<int64_t>& counts);
  Work reduce_scatter_async(at::Tensor flat, const std::vector<int64_t>& counts);
  /// Reduce-scatter that hands each reduced run to `consume(offset, run)` as it is ready, hot in
  /// cache, instead of leaving it in `flat`: `offset` counts elements from the start of own
  /// segment, `run` is a 1-D tensor of flat's dtype, valid during the call. Runs come in ascending
  /// order and cover own segment exactly once. `flat` is not modified, and is free to be written
  /// again when the call returns (on all ranks).
  using ConsumeRun = std::function<void(int64_t offset, const at::Tensor& run)>;
  void reduce_scatter_each(at::Tensor flat, const std::vector<int64_t>& counts,
                           const ConsumeRun& consume);
  /// `consume` then runs on another thread.
  Work reduce_scatter_each_async(at::Tensor flat, const std::vector<int64_t>& counts,
                                 ConsumeRun consume, const std::string& tag = "");
  /// Own segment's sum, times `scale` (rounded after the sum), goes to `output`: 1-D, contiguous,
  /// counts[rank] elements of flat's dtype and device, no part of `flat`, which is not modified.
  /// `tag` as in all_gather_async.
  Work reduce_scatter_into_async(at::Tensor flat, const std::vector<int64_t>& counts,
                                 at::Tensor output, double scale = 1, const std::string& tag = "");

  /// send_counts[r] elements of `input`, in rank order, go to rank r; recv_counts[r] arrive from
  /// it. 1-D tensors.
  void all_to_all(at::Tensor output, at::Tensor input, const std::vector<int64_t>& recv_counts,
                  const std::vector<int64_t>& send_counts);
  /// `tag` as in all_gather_async.
  void barrier(const std::string& tag = "");

  /// Byte strings (control data; sizes may differ between ranks).
  std::vector<std::string> all_gather_bytes(const std::string& mine);
  std::string broadcast_bytes(const std::string& mine, int root);
  /// On root the ranks' strings, elsewhere an empty vector.
  std::vector<std::string> gather_bytes(const std::string& mine, int root);

  /// Sub-groups: ranks that pass the same color (>= 0) form a group, ordered by rank. A negative
  /// color returns nullopt. The sub-group has its own counters and the parent's options.
  std::optional<ProcessGroup> split(int color);

  /// Throws UsageError on every rank when `entries` differ between ranks, naming `component`, the
  /// first differing index, and what this rank and the lowest rank that differs from it have there.
  /// For wrappers: names, shapes, dtypes, options, in order.
  void check_contract(const std::string& component, const std::vector<std::string>& entries);

  /// Ends the group and its sub-groups because of this rank's mistake: throws UsageError(message)
  /// here, and on every other rank in the collective of one of these groups where it waits or that
  /// it calls next. Not a collective. They cannot be used afterwards.
  [[noreturn]] void fail(const std::string& message);
  /// A rank called fail(), and this one knows. Local.
  bool ended() const;

  /// A 1-D zero-filled tensor whose memory peers can read in place when the group is on one host
  /// ("shm"), else an ordinary one. Collectives on (parts of) such tensors avoid a copy.
  /// Collective; same numel and dtype on every rank.
  at::Tensor allocate(int64_t numel, at::TensorOptions options);
  /// Rank `peer`'s tensor of that same allocate() call, for reading between barriers; undefined
  /// when it is not shared. Local.
  at::Tensor peer_view(const at::Tensor& allocated, int peer) const;
  /// A 1-D zero-filled tensor of which there is one for all ranks of a group on one host ("shm"):
  /// what one writes, all see. Undefined where ranks share no memory. all_gather of (a part of) it
  /// moves nothing, for every segment is in its place: when it returns, what each rank wrote before
  /// calling is everyone's. Other collectives take parts that do not overlap between ranks. Who
  /// writes while another reads is the caller's affair. Collective; same numel and dtype on every
  /// rank; undefined in a world of one.
  at::Tensor allocate_common(int64_t numel, at::TensorOptions options);

  /// Where tensors of a few numbers must live to be reduced: the CPU, or the current CUDA device
  /// for NCCL. Local.
  at::Device control_device() const;

  /// Local.
  CommStats stats() const;
  void reset_stats();

  class Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

/// Starts this process's part of the world, from the environment, in this order: torchrun and
/// `tessera run` (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), Open
/// MPI (OMPI_COMM_WORLD_*), PMI (PMI_RANK, PMI_SIZE), Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS, or
/// where that is missing SLURM_NTASKS). With none set the world is one rank. On one host only
/// loopback addresses are bound. Blocks until all ranks have arrived, at most the time-out. Errors:
/// UsageError for a contradictory or malformed environment (naming the variable), BrokenWorldError
/// naming the ranks that did not arrive.
ProcessGroup init_process_group(ProcessGroupOptions options = {});

}  // namespace tessera
