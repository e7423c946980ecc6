#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/process_group.h"

namespace tessera {

/// One iteration of a joined loop. The same on all ranks.
struct JoinIteration {
  int active_ranks = 1;  ///< How many ranks have data in it.
  int first_active = 0;  ///< The lowest of them: whose buffers are everyone's.
  int divisor = 1;       ///< What a mean of gradients divides by.
};

/// What can take part in join(): something whose iteration makes collectives that all ranks must be
/// in. Implemented by DistributedDataParallel, FullyShardedDataParallel, ZeroRedundancyOptimizer
/// and DistributedOptimizer; a program may add its own.
class Joinable {
 public:
  virtual ~Joinable() = default;

  /// Of whose ranks it needs all. Local.
  virtual ProcessGroup join_group() const = 0;
  /// An iteration begins; also called when the join is over, with all ranks active. On all ranks.
  /// Local.
  virtual void on_join_iteration(const JoinIteration& iteration) {}
  /// On a rank that is out of data: makes the collectives of one iteration of an active rank, in
  /// their order, with nothing to contribute.
  virtual void shadow_step() = 0;
  /// After the last iteration, when some rank ended before others: gives all ranks what
  /// `last_active_rank` has. On all ranks. Collective.
  virtual void finish_join(int last_active_rank) {}
};

struct JoinOptions {
  /// A mean divides by the number of all ranks; a rank out of data counts as gradients of zero.
  /// Off: by the number of ranks that still have data.
  bool divide_by_initial_world_size = true;
  /// No shadowing: when the first rank runs out of data while others have some, all ranks throw
  /// UsageError naming it.
  bool throw_on_early_termination = false;
  /// Off: the loop runs as if it were not joined; next() does nothing.
  bool enable = true;
};

/// The loop's end of a join.
class JoinLoop {
 public:
  /// Begins an iteration: for a rank that has data for it, before it does anything else with the
  /// joinables. One all-reduce of one number, and while some rank is out of data a few bytes more.
  /// Collective with the ranks out of data.
  void next();

  class Session;
  explicit JoinLoop(Session& session) : session_(session) {}

 private:
  Session& session_;
};

/// Runs `loop` on every rank, though the ranks have unequal amounts of data (PyTorch's
/// algorithms.join):
///
///   tessera::join({ddp, zero}, {}, [&](tessera::JoinLoop& iteration) {
///     for (auto& batch : *loader) {
///       iteration.next();
///       loss_of(ddp(batch.data)).backward();
///       zero.step();
///     }
///   });
///
/// A rank whose `loop` returned shadows the others' iterations until all are done. The joinables
/// are given in the order in which an iteration uses them; between two next() each does what its
/// shadow_step() shadows, once: DistributedDataParallel one forward and one backward that
/// synchronises (more under no_sync), the optimizers one backward and one step(). At the end, when
/// ranks ended at different iterations, the parameters of the last active rank are everyone's (of
/// several, the lowest). Collective; blocks. A rank whose loop throws keeps its exception, and all
/// others throw UsageError with its rank and message, where they wait or at their next collective
/// of that group; the group has then ended. UsageError for no joinables, and for joinables of
/// groups that differ.
void join(const std::vector<std::reference_wrapper<Joinable>>& joinables,
          const JoinOptions& options, const std::function<void(JoinLoop&)>& loop);

}  // namespace tessera
