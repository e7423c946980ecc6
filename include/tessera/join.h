#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

/// One iteration of a joined loop. The same on all ranks.
struct JoinIteration {
  int active_ranks = 1;  ///< Number of ranks that have data in this iteration.
  int first_active = 0;  ///< The lowest of these ranks. Its buffers are broadcast to all ranks.
  int divisor = 1;       ///< The number by which a mean of gradients divides their sum.
  /// For each rank of the joined group whether it has data; empty: all have.
  std::vector<bool> has_data = {};
};

/// An object whose iterations make collectives in which all ranks must take part. The wrappers
/// DistributedDataParallel, FullyShardedDataParallel, ZeroRedundancyOptimizer and
/// DistributedOptimizer implement it; a program may add its own.
class Joinable {
 public:
  virtual ~Joinable() = default;

  /// The group whose ranks must all take part. Local.
  virtual ProcessGroup join_group() const = 0;
  /// Called on all ranks when an iteration begins, and once at the end of the join, with all ranks
  /// active. Local.
  virtual void on_join_iteration(const JoinIteration& iteration) {}
  /// Called on a rank that is out of data. Makes the collectives of one iteration of an active
  /// rank, in the same order, with a contribution of zero. Collective.
  virtual void shadow_step() = 0;
  /// Called on all ranks after the last iteration, if some rank ended before others. Gives all
  /// ranks the parameters (and buffers) of `last_active_rank`. Collective.
  virtual void finish_join(int last_active_rank) {}
};

struct JoinOptions {
  /// On: a mean divides by the number of all ranks; the gradients of a rank that is out of data
  /// count as zero. Off: it divides by the number of ranks that still have data.
  bool divide_by_initial_world_size = true;
  /// On: when the first rank runs out of data while others still have some, all ranks throw
  /// UsageError naming it, instead of continuing without it.
  bool throw_on_early_termination = false;
  /// Off: the loop runs as if it were not joined, and next() does nothing.
  bool enable = true;
};

/// The argument of the function that join() runs.
class JoinLoop {
 public:
  /// Begins an iteration. A rank that has data for the iteration calls it before it uses a
  /// joinable. Costs one all-reduce of one number, and a few bytes more while some rank is out of
  /// data. Collective: the ranks out of data take part inside join(). Blocks.
  void next();

  class [[gnu::visibility("hidden")]] Coordinator;
  explicit JoinLoop(Coordinator& coordinator) : coordinator_(coordinator) {}

 private:
  Coordinator& coordinator_;
};

/// Runs `loop` on every rank, where the ranks may have unequal amounts of data. Follows PyTorch's
/// torch.distributed.algorithms.join.
///
///   tessera::join({ddp, zero}, {}, [&](tessera::JoinLoop& iteration) {
///     for (auto& batch : *loader) {
///       iteration.next();
///       loss_of(ddp(batch.data)).backward();
///       zero.step();
///     }
///   });
///
/// A rank whose `loop` has returned calls shadow_step() of each joinable, in the given order, for
/// each iteration of the other ranks, until all ranks are done. List the joinables in the order in
/// which an iteration uses them. Between two calls of next(), a rank must use each joinable once,
/// as its shadow_step() does: DistributedDataParallel makes one forward and one backward pass that
/// synchronises (further ones under no_sync()), an optimizer one backward pass and one step(). If
/// the ranks ended at different iterations, all ranks get the parameters of the last active rank in
/// the end (of several such ranks, of the lowest).
///
/// Collective; blocks. If `loop` throws on a rank, that rank rethrows its exception. All other
/// ranks throw UsageError with its rank and message, from the collective in which they wait or from
/// their next collective of the group; the group cannot be used afterwards. Throws UsageError if
/// there are no joinables, and if the groups of the joinables have different ranks.
void join(const std::vector<std::reference_wrapper<Joinable>>& joinables,
          const JoinOptions& options, const std::function<void(JoinLoop&)>& loop);

}  // namespace tessera
#pragma GCC visibility pop
