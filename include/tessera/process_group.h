#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tessera/wire.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Handle of an asynchronous collective. Copies refer to the same collective. A default-constructed
/// handle is complete. Tensors passed to an asynchronous collective must not be used until it is
/// complete.
class Work {
 public:
  class [[gnu::visibility("hidden")]] State;

  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}

  /// Blocks until the collective is complete. For tensors on a device it makes the current stream
  /// wait instead; the host then waits only until the other ranks have issued the same collective,
  /// if collectives are checked. Rethrows the error of the collective (BrokenWorldError,
  /// UsageError), on every call.
  void wait();
  /// True when wait() would not block.
  bool done() const;

 private:
  std::shared_ptr<State> state_;
};

/// Traffic of one kind of collective on this rank, since construction or reset_stats().
struct CollectiveStats {
  uint64_t calls = 0;
  /// Payload bytes that this rank sent to or received from other ranks. Counted by algorithm,
  /// whatever the transport: with W ranks and tensors of N bytes in total, a reduce-scatter or an
  /// all-gather counts (W-1)/W * N each way, an all-reduce 2 (W-1)/W * N.
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

/// Traffic of a group on this rank, by kind of collective.
struct CommStats {
  CollectiveStats all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier,
      bytes;
  /// Seconds that calling threads spent in blocking collectives and in Work::wait(), waiting for
  /// other ranks and moving data. 0 where a stream of a device waits instead.
  double waited_seconds = 0;

  /// Bytes received and sent, summed over all kinds but `bytes` (control messages).
  uint64_t payload_received() const;
  uint64_t payload_sent() const;
  /// Calls of all kinds.
  uint64_t calls() const;
};

/// The transport of a group. Auto: shared memory within a host, TCP between hosts. Where the ranks
/// of a host cannot map each other's memory, TCP is used there too, which is logged once with its
/// reason. TCP and Gloo use messages alone, on one host too. Gloo is libtorch's; Auto uses it
/// instead of TCP if GLOO_DEVICE_TRANSPORT selects another transport of Gloo, such as TCP_TLS. In a
/// group of init_process_group(MPI_Comm) Auto takes MPI between hosts if it was measured twice as
/// fast at start-up.
///
/// MPI: as Auto, with messages over the program's MPI in place of TCP between hosts, and on one
/// host for all data. For groups of init_process_group(MPI_Comm) (tessera/mpi.h) alone; a
/// UsageError in others. Threads of the group call MPI, so it takes MPI_THREAD_MULTIPLE; with less,
/// TCP is used, which is logged once. The last such group must be destroyed before MPI_Finalize.
enum class Backend { Auto, SharedMemory, Gloo, NCCL, MPI, TCP };

struct ProcessGroupOptions {
  Backend backend = Backend::Auto;

  /// Upper bound of every wait for other ranks: at start-up, in collectives and in barriers. Must
  /// be positive. A stopped rank is noticed only when the time-out passes. Increase it when ranks
  /// may arrive at a collective further apart than this (slow storage, long evaluation on one
  /// rank).
  std::chrono::milliseconds timeout = std::chrono::seconds(60);

  /// Compare (sequence number, operation, sizes, dtype) between the ranks before each collective. A
  /// difference throws UsageError on all ranks before data moves. Switching it off saves the
  /// latency of that exchange; mismatched calls are then not detected. Asynchronous collectives on
  /// tensors of a device are compared while they run: a difference throws in Work::wait() and ends
  /// the group.
  bool check_collectives = true;

  /// For debugging: verify the result of each collective. Sums are compared with those of the
  /// ranks' inputs, which travel a second time; received values are compared with a digest of the
  /// sent ones. A wrong result (a fault of memory, of a wire, of a transport, or a tensor that was
  /// written during the collective) throws AgreedError on all ranks, which names the collective and
  /// the rank. More than doubles the time of collectives. CPU tensors only.
  bool check_results = false;

  /// The type of an accelerator whose tensors the group moves without a backend for it, for example
  /// at::kCUDA where NCCL is missing. They travel through pinned memory of the host and over
  /// `backend`, which must not be NCCL. Values are those of CPU tensors. Each collective copies
  /// twice and makes the host wait for the device: the calling thread where it blocks, another
  /// thread where it is asynchronous, and then Work::wait(). at::kCPU: the group moves CPU tensors
  /// and those of its backend.
  at::DeviceType staged_device = at::kCPU;

  /// Take sums on a device in the order of CPU tensors (see ProcessGroup) and not in the order of
  /// the device's backend. They are taken by an all_to_all and a local sum: results depend on
  /// neither the backend nor the number of its channels, and have the bits of a CPU group. It needs
  /// memory for the received parts, and on several hosts more bytes between them. All ranks must
  /// have the same value: the first collective on a device throws UsageError otherwise. No effect
  /// on CPU tensors and with staged_device, whose sums always have this order.
  bool deterministic = false;

  /// Tune the whole process for training: keep freed memory in it (glibc: M_MMAP_MAX = 0,
  /// M_TRIM_THRESHOLD = max) and serve libtorch's CPU tensors from malloc, so that a freed block
  /// fits the next tensor of its size. Otherwise freed memory goes back to the system in every
  /// step, and the step pays for page faults on fresh memory. The settings stay until the process
  /// ends. libtorch's CPU allocator is replaced only if the program has not set its own. No effect
  /// when the world size is 1 or without glibc. The trainer sets it.
  bool tune_process = false;
};

/// A set of ranks that communicate. A value handle: copies share one state. A default-constructed
/// group has one rank, and its collectives are local no-ops.
///
/// Collective members must be called by all ranks of the group, in the same order, and from one
/// thread at a time. They block until this rank's part is complete; those named `_async` return a
/// Work instead. Local members involve no other rank and do not block.
///
/// Tensors may be empty and non-contiguous unless stated otherwise, and of any dtype where data
/// only moves, but not quantized. Sums need a floating-point or integral dtype; a `scale` other
/// than 1 needs a floating-point one. They are taken by a binary tree over aligned blocks of ranks,
/// (x0 + x1) + (x2 + x3), element by element, whatever the transport, so results are bit-identical
/// across transports and algorithms. Half and bfloat16 are summed and scaled in float32 and rounded
/// once, so a mean is in range where all values are. The exception are tensors of a device with a
/// backend of its own (NCCL): it adds in its own order and rounds each step to the tensor's dtype,
/// unless ProcessGroupOptions::deterministic. 16-bit values are scaled before they are added there,
/// so a mean is in range too. All ranks get the same bits.
///
/// Errors of every collective member:
///   UsageError        the caller's mistake. When ranks disagree, all of them throw before data
///                     moves (see ProcessGroupOptions::check_collectives).
///   BrokenWorldError  a peer died, left, or did not arrive within the time-out. The message and
///                     ranks() name it. The group cannot be used any more.
class ProcessGroup {
 public:
  /// A group of one rank. Local.
  ProcessGroup();

  /// Rank of this process in the group: 0 <= rank() < size(). Local.
  int rank() const;
  /// Number of ranks in the group (its world size). Local.
  int size() const;
  /// Number of this process among the group's members on its host, in order of their ranks:
  /// 0 <= local_rank() < local_size(). For example the number of the device for this rank.
  /// Known from the start-up of the group, whatever the launcher. The hosts of a from_c10d() group
  /// are unknown; then the launcher's variables are used (LOCAL_RANK, LOCAL_WORLD_SIZE or Open
  /// MPI's, PMI's or Slurm's). Throws UsageError when these are missing or describe another group.
  /// Local.
  int local_rank() const;
  /// Number of the group's members on this host. Hosts may differ in it. Source and errors as
  /// local_rank(). Local.
  int local_size() const;
  /// The members' ranks in the group that init_process_group() made, in rank order. Local.
  const std::vector<int>& world_ranks() const;
  /// True when all ranks are known to be on one host (they may then share memory). Local.
  bool same_host() const;
  /// "self" (one rank), "shm", "tcp" (with shared memory within each of several hosts), "gloo",
  /// "nccl", "mpi" or "c10d"; staged tensors have the name of CPU tensors. Local.
  std::string backend_name() const;
  /// True when the ranks are on several hosts and exchange messages over TCP, Gloo or MPI. The
  /// wrappers then have several collectives under way by default. Local.
  bool messages_between_hosts() const;
  /// The device for small tensors that are to be reduced and whose values the host has: the CPU.
  /// With NCCL these tensors travel beside the device's streams, so the host does not wait for a
  /// stream. Local.
  at::Device control_device() const;
  /// True if collectives take tensors on devices of this type: always for the CPU; for an
  /// accelerator if the group has a backend for it or stages its tensors. All of them in a group of
  /// one rank. Local.
  bool moves(at::DeviceType type) const;

  /// See ProcessGroupOptions::timeout. Local.
  std::chrono::milliseconds timeout() const;
  /// Sets the time-out of this group and of its sub-groups (those that wrappers have made, too)
  /// that had the same time-out as this group. Local, but every rank must set the same value. NCCL
  /// keeps the time-out given at construction. Throws UsageError unless positive.
  void set_timeout(std::chrono::milliseconds timeout);
  /// For this group alone, where ranks may be busy, for example with a disk. A rank that is stopped
  /// or unreachable is given up after `stopped`; in a group of from_c10d() after `timeout`. A rank
  /// that makes this call later than another by the former time-out is given up too. Messages:
  /// docs/hosts.md.
  void set_timeout(std::chrono::milliseconds timeout, std::chrono::milliseconds stopped);

  // A `tag` describes the purpose of a call. Ranks that pass different tags disagree, and the error
  // names both tags, up to 95 characters of each. If ranks call two collectives in different
  // orders, that is then an error even for equal tensors.

  /// Sums `tensor` over the ranks, in place, with the result on every rank. The finished sum is
  /// multiplied by `scale`, before it is rounded to 16 bits. Collective; same numel, dtype and
  /// scale on every rank.
  void all_reduce(at::Tensor tensor, double scale = 1, const std::string& tag = "");
  Work all_reduce_async(at::Tensor tensor, double scale = 1, const std::string& tag = "");

  /// Sums `tensor` over the ranks, in place on `root`. Other ranks' tensors are unchanged.
  /// Collective.
  void reduce(at::Tensor tensor, int root, const std::string& tag = "");

  /// Copies root's tensor to every rank, in place. Collective; same numel and dtype on every rank.
  void broadcast(at::Tensor tensor, int root, const std::string& tag = "");
  Work broadcast_async(at::Tensor tensor, int root, const std::string& tag = "");
  /// Copies several tensors of one root to every rank, packed by dtype into few messages.
  /// Collective.
  void broadcast(std::vector<at::Tensor> tensors, int root, const std::string& tag = "");

  /// Gathers the ranks' segments of one flat tensor, in place. `flat` is 1-D, contiguous and
  /// consists of consecutive segments, one for each rank; rank r's has counts[r] elements (0 is
  /// allowed; their sum is flat.numel()). This rank's segment is the input, the whole tensor is the
  /// output. Collective; same counts on every rank.
  void all_gather(at::Tensor flat, const std::vector<int64_t>& counts, const std::string& tag = "");
  Work all_gather_async(at::Tensor flat, const std::vector<int64_t>& counts,
                        const std::string& tag = "");
  /// Returns the concatenation of the ranks' tensors in rank order, 1-D. Each rank's tensor is
  /// flattened; their sizes may differ. Collective; same dtype on every rank.
  at::Tensor all_gather(at::Tensor tensor);

  /// The reverse of all_gather(): this rank's segment of `flat` becomes the sum over ranks of that
  /// segment. The other segments are unspecified afterwards. `flat` and `counts` as in
  /// all_gather(). Collective.
  void reduce_scatter(at::Tensor flat, const std::vector<int64_t>& counts,
                      const std::string& tag = "");

  /// Receives one reduced run of this rank's segment. `offset`: elements from the start of the
  /// segment. `run`: 1-D, of flat's dtype, valid during the call only.
  using ConsumeRun = std::function<void(int64_t offset, const at::Tensor& run)>;
  /// Reduce-scatter that passes each reduced run to `consume` as soon as it is ready and still in
  /// cache, instead of storing it in `flat`. Runs come in ascending order and cover this rank's
  /// segment exactly once. `flat` is not modified, and may be written again when the call returns.
  /// Sums are multiplied by `scale`, which may differ between ranks. Collective.
  void reduce_scatter_each(at::Tensor flat, const std::vector<int64_t>& counts,
                           const ConsumeRun& consume, double scale = 1,
                           const std::string& tag = "");
  /// As reduce_scatter_each(), but `consume` runs on another thread.
  Work reduce_scatter_each_async(at::Tensor flat, const std::vector<int64_t>& counts,
                                 ConsumeRun consume, double scale = 1, const std::string& tag = "");
  /// Reduce-scatter that writes this rank's sum, times `scale` (applied to the finished sum), to
  /// `output`: 1-D, contiguous, counts[rank()] elements of flat's dtype and device, not overlapping
  /// `flat`, which is not modified. Collective.
  Work reduce_scatter_into_async(at::Tensor flat, const std::vector<int64_t>& counts,
                                 at::Tensor output, double scale = 1, const std::string& tag = "");

  /// Sends consecutive parts of `input` to the ranks, in rank order: send_counts[r] elements to
  /// rank r. recv_counts[r] elements arrive from rank r and are stored in `output` in rank order.
  /// Both tensors are 1-D and contiguous, and do not overlap. Collective.
  void all_to_all(at::Tensor output, at::Tensor input, const std::vector<int64_t>& recv_counts,
                  const std::vector<int64_t>& send_counts, const std::string& tag = "");

  /// Blocks until all ranks have called it. Collective.
  void barrier(const std::string& tag = "");

  // Byte strings, for control data. Their sizes may differ between ranks.

  /// Returns every rank's string in rank order. Collective.
  std::vector<std::string> all_gather_bytes(const std::string& mine, const std::string& tag = "");
  /// Returns root's string. Collective.
  std::string broadcast_bytes(const std::string& mine, int root, const std::string& tag = "");
  /// Returns every rank's string in rank order on root, an empty vector elsewhere. Collective.
  std::vector<std::string> gather_bytes(const std::string& mine, int root,
                                        const std::string& tag = "");

  /// Makes sub-groups: the ranks that pass the same color (>= 0) form a group, in order of their
  /// ranks. Returns this rank's group, or nullopt when its color is negative. A sub-group has its
  /// own counters and the options of its parent. Collective: all ranks of this group must call it,
  /// those with a negative color too. Throws UsageError for groups of from_c10d(), which have no
  /// store.
  std::optional<ProcessGroup> split(int color);

  /// Returns a group of the same ranks with connections of its own, whose collectives run beside
  /// those of this group. Both groups share their stats(). Memory of allocate() may be used in
  /// both. The new group has this group's options. Collective. Throws UsageError for groups of
  /// from_c10d(). A group of one rank is returned itself.
  ProcessGroup duplicate();

  /// Returns a group of the same ranks in which floating-point values of all_reduce(), all_gather()
  /// and the reduce-scatters travel between hosts in `format`, with more connections and memory of
  /// its own. A sum is rounded once on each host, after the sum over that host's ranks; the second
  /// half of an all-reduce is rounded again, by the owners of its parts. The owner rounds gathered
  /// or all-reduced values too, so all ranks have the same bits. Other collectives and other dtypes
  /// are unchanged; float64 is a UsageError. Returns this group itself for float32, and if all
  /// ranks are on one host. Collective; the same format on every rank. Throws UsageError for groups
  /// of from_c10d(), with check_results, with the backend NCCL, and if the ranks of a host cannot
  /// share memory. Both groups share their stats(), and their collectives are compared in one
  /// order: all ranks must call the collectives of both in the same order. Another order is an
  /// error on all ranks at once.
  ProcessGroup with_wire(WireFormat format);

  /// Returns a group of the same ranks that moves tensors of `device` too, this rank's accelerator,
  /// with connections of its own. With Backend::Auto it uses the backend of this build for that
  /// type (NCCL for CUDA) if each rank of a host has a device of its own. Otherwise, and with
  /// another backend for CPU tensors, tensors are staged as with
  /// ProcessGroupOptions::staged_device. If no option asked for that, it is logged once, with the
  /// reason. Returns this group itself for the CPU, in a group of one rank, and if it moves such
  /// tensors already. Both groups share their stats(). Collective; the same type of device on every
  /// rank. Throws UsageError for a type that this process does not see (all ranks throw), for
  /// groups of from_c10d(), and with check_results.
  ProcessGroup with_device(at::Device device);

  /// Throws UsageError on every rank when `entries` differ between ranks. The message names
  /// `component`, the first differing index, and the entries there of this rank and of the lowest
  /// rank that differs from it. For wrappers: names, shapes, dtypes and options, in order.
  /// Collective.
  void check_contract(const std::string& component, const std::vector<std::string>& entries);

  /// Ends the group and its sub-groups because of this rank's mistake. Throws UsageError(message)
  /// here (AgreedError if all ranks got the message), and on every other rank in the collective of
  /// these groups that it waits in or calls next. The groups cannot be used afterwards. Not
  /// collective: one rank calls it, and blocks until the other ranks know, at most the time-out.
  [[noreturn]] void fail(const std::string& message);
  /// True when a rank has called fail() and this rank knows it. Local.
  bool ended() const;

  /// Returns a 1-D zero-filled tensor. Where the ranks of a host share memory they can read it in
  /// place, and collectives on such tensors, or on parts of them, avoid a copy. Elsewhere it is an
  /// ordinary tensor. Collective; same numel and dtype on every rank.
  at::Tensor allocate(int64_t numel, at::TensorOptions options);
  /// Returns rank `peer`'s tensor of the allocate() call that made `allocated`, for reading between
  /// barriers; an undefined tensor when its memory is not shared. Local.
  at::Tensor peer_view(const at::Tensor& allocated, int peer) const;
  /// Returns a 1-D zero-filled tensor whose memory is common to the ranks of a host, if these share
  /// memory: each sees what the others write. The caller must synchronize concurrent reads and
  /// writes. An all_gather() of it, or of a part of it, is a barrier within a host and moves
  /// nothing there; one rank of a host receives the other hosts' parts. Other collectives need
  /// parts that do not overlap between ranks. Returns an undefined tensor in a group of one rank
  /// and where ranks share no memory. Collective; same numel and dtype on every rank.
  at::Tensor allocate_common(int64_t numel, at::TensorOptions options);

  /// Traffic since construction or the last reset_stats(). Includes the groups of duplicate(),
  /// with_wire() and with_device(), but not those of split(). Local.
  CommStats stats() const;
  /// Local.
  void reset_stats();

  class [[gnu::visibility("hidden")]] Impl;
  explicit ProcessGroup(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

/// Makes this process a rank of the world that its launcher started. Reads the environment
/// variables of the first of these launchers that has set them:
///   torchrun, `tessera run`  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
///                            MASTER_PORT
///   Open MPI                 OMPI_COMM_WORLD_*
///   PMI                      PMI_RANK, PMI_SIZE
///   Slurm                    SLURM_PROCID, SLURM_STEP_NUM_TASKS (if unset, SLURM_NTASKS)
/// Without any of them the world has one rank. When all ranks are on one host, only loopback
/// addresses are bound. Collective; blocks until all ranks have arrived, at most
/// `options.timeout`. Throws UsageError when the environment is contradictory or malformed (naming
/// the variable), BrokenWorldError naming the ranks that did not arrive.
ProcessGroup init_process_group(ProcessGroupOptions options = {});

/// The group that the last init_process_group() of this process returned, while a copy of it
/// exists; otherwise nullopt. Local.
std::optional<ProcessGroup> default_process_group();

}  // namespace tessera
#pragma GCC visibility pop
