#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The ranks that a library of the program knows, such as MPI, and the bytes that it carries
/// between them. tessera/mpi.h implements it in the program, with the program's MPI: libtessera
/// links none.
class Communicator {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  /// One message under way. It keeps its tensor while the library may use the memory.
  class Transfer {
   public:
    virtual ~Transfer() = default;
    /// True when the message is complete. Does not block. Throws std::runtime_error with the
    /// library's text, or if another number of bytes arrived.
    virtual bool test() = 0;
  };

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Every rank's string in rank order; their sizes may differ. Collective, during start-up and on
  /// its thread. Throws BrokenWorldError at the deadline, and std::runtime_error.
  virtual std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) = 0;
  /// The reason why other threads cannot send messages here, as "MPI provides MPI_THREAD_SINGLE";
  /// empty if they can. The members below need other threads. Local.
  virtual std::string refuses_threads() const = 0;
  /// A communicator of these ranks, with messages of its own. Exactly these ranks call it; blocks
  /// until all have. `number` differs between calls that overlap.
  virtual std::shared_ptr<Communicator> subset(const std::vector<int>& ranks, int number) = 0;
  /// Starts a message; `tensor` is contiguous. Messages of one pair and one tag arrive in order.
  virtual std::unique_ptr<Transfer> send(at::Tensor tensor, int to, int tag) = 0;
  virtual std::unique_ptr<Transfer> receive(at::Tensor tensor, int from, int tag) = 0;
};

/// Makes this process the rank of `communicator` in a group of its ranks. The launcher's variables
/// are not read. See init_process_group(MPI_Comm) in tessera/mpi.h.
ProcessGroup init_process_group(std::shared_ptr<Communicator> communicator,
                                ProcessGroupOptions options);

}  // namespace tessera::detail
#pragma GCC visibility pop
