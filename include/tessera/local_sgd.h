#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tessera/join.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/overlap.h"

#pragma GCC visibility push(default)
namespace tessera {

/// The rule that computes the parameters of the next synchronisation from the last ones.
enum class OuterOptimizer {
  average,   ///< LocalSGD: the mean of the ranks' parameters.
  nesterov,  ///< DiLoCo: SGD with Nesterov momentum, whose gradient is the mean difference.
};

/// The form in which differences travel between the groups.
enum class OuterWire {
  float32,  ///< float32, unchanged (float64 where a parameter is float64).
  int8,     ///< 8 bits a value and a float32 scale for each 256 values, with error feedback.
};

struct LocalSgdOptions {
  /// Steps from one synchronisation to the next, >= 1.
  int64_t sync_every = 50;
  OuterOptimizer outer = OuterOptimizer::nesterov;
  /// Options of nesterov: learning rate, finite and > 0, and momentum, 0 <= momentum < 1. The
  /// defaults are those of DiLoCo.
  double lr = 0.7;
  double momentum = 0.9;
  OuterWire wire = OuterWire::float32;
  /// `background`: the differences of one synchronisation travel during the following `sync_every`
  /// steps and are applied at the next one, which changes results. The progress that a rank made
  /// meanwhile is kept. Otherwise a synchronisation blocks.
  Overlap overlap = Overlap::backward;
};

/// The groups of a rank: `inner` trains together in every step, `outer` has the ranks with the same
/// number in the other inner groups.
struct LocalSgdGroups {
  ProcessGroup inner, outer;
};

/// Divides `world`. `group_size` > 0: inner groups of that many consecutive ranks. 0: one inner
/// group for each host. Collective; blocks. Throws UsageError on all ranks if the inner groups
/// would not have equal sizes, if group_size is negative, and for 0 if all ranks are on one host or
/// the hosts are unknown.
LocalSgdGroups local_sgd_groups(ProcessGroup& world, int64_t group_size = 0);

/// Synchronises groups of ranks only every k steps: LocalSGD, and DiLoCo (Douillard et al., 2023).
/// Within a group the ranks train as usual, with any wrapper and any optimizer. At a
/// synchronisation each rank has moved from the parameters A of the last one to its own p. The mean
/// of A - p over `outer` is the gradient with which the outer optimizer changes A; then every rank
/// continues from A.
///
///   auto [inner, outer] = tessera::local_sgd_groups(world);
///   tessera::ZeroRedundancyOptimizer zero(*net, inner, adamw);
///   tessera::LocalSgd local(outer, zero.shards(), {.sync_every = 50}, {},
///                           [&] { zero.gather_parameters(); }, [&] { zero.wait_for_readers(); });
///   for (...) {
///     loss_of(net(batch)).backward();
///     zero.step();
///     local.step();
///   }
///   local.synchronize();
///
/// The results are the same bits on all ranks of `outer`. After a synchronisation in the background
/// only A is the same, because each rank's parameters include its own progress. Buffers are not
/// synchronised.
///
/// Memory: one copy of this rank's shards (divided by the size of `replicas`), a second one with
/// nesterov, a third one with int8, and two more with Overlap::background.
///
/// UsageErrors name the parameter. After an error of a collective every further call is a
/// UsageError that repeats it.
class LocalSgd : public Joinable {
 public:
  /// `shards`: the elements that this rank updates, in the same order on all ranks of `outer`:
  /// `shards()` of ZeroRedundancyOptimizer and FullyShardedDataParallel, `parameter_shards()` of a
  /// plain model or of DistributedDataParallel. They must stay valid.
  /// `replicas`: the ranks that hold equal copies of `shards`: the inner group with
  /// DistributedDataParallel. Each of them then sends an equal part, so that every value leaves the
  /// group once.
  /// `publish`: called after the shards were written, on every rank; sends the values to the other
  /// ranks of the inner group where these need a call to get them (gather_parameters()). `prepare`:
  /// called before the shards are read and written, on every rank: waits until nothing else uses
  /// them (wait_for_readers(), which ZeroRedundancyOptimizer with share_parameters or
  /// Overlap::background needs).
  ///
  /// Gives all ranks of `outer` the parameters of its rank 0. Frozen parameters and buffers have no
  /// shards and must be equal already. Collective over `outer`, `replicas`, `publish` and
  /// `prepare`; blocks. Throws UsageError on all ranks of `outer` for an option out of range, for
  /// undefined or sparse shards and shards of integers, and if the ranks differ in
  /// options or shards.
  LocalSgd(ProcessGroup outer, std::vector<ParameterShard> shards, LocalSgdOptions options = {},
           ProcessGroup replicas = {}, std::function<void()> publish = {},
           std::function<void()> prepare = {});
  ~LocalSgd() override;

  /// Call it after each step of the inner optimizer. Every `sync_every`-th call synchronises: one
  /// all-reduce over `outer`, or one all-gather of bytes with int8, and one all-gather over
  /// `replicas`; collective and blocking then, otherwise local. Throws UsageError, on all ranks of
  /// `outer`, if a shard's storage, size or dtype has changed since construction, and if only this
  /// object still holds the shard's tensor, because its optimizer was destroyed.
  void step();
  /// Synchronises now and waits for the differences under way, so that all ranks of `outer` have
  /// equal parameters. Call it at the end of training. Does not count as a step. Without a step()
  /// since the last synchronisation it only waits for the differences under way: another
  /// synchronisation would move the parameters by the outer momentum alone. Collective.
  void synchronize();

  int64_t steps() const;             ///< Calls of step(). Local.
  int64_t synchronizations() const;  ///< Synchronisations begun. Local.

  /// Entries "steps", "synchronizations", "anchor" (A), and where they exist "momentum",
  /// "residual" (what int8 has not sent yet), "pending" and "start" (the mean difference under way
  /// and the parameters when it began). Copies on the CPU, of this rank's part; each rank saves its
  /// own. Waits for differences under way. The parameters and the inner optimizer's state are not
  /// contained, and between two synchronisations every group has its own.
  using State = std::map<std::string, at::Tensor>;
  State state_dict();
  /// Loads a state that the same rank saved with the same groups and options. Load the parameters
  /// after the construction, which overwrites them. Local; all ranks must load. Throws UsageError
  /// for entries that are missing, unknown or of another size; nothing changes then.
  void load_state_dict(const State& state);
  /// The elements of the parameters to which the elements of the tensors of state_dict() belong, in
  /// their order, so that a checkpoint can divide the state otherwise. A complex parameter counts
  /// as one of real numbers with a last dimension of 2. "steps" and "synchronizations" belong to
  /// none. Local.
  std::vector<ElementRange> state_ranges() const;

  // Join. Without set_join() it is one over `outer`: a rank without data keeps its parameters and
  // takes part in the synchronisations.

  /// Makes this object the joinable of a loop over `world`, the ranks of all groups. `inner` are
  /// the joinables of this rank's inner group. It forwards to them, with the numbers of the inner
  /// group. `shadow`: the calls of a rank without data in a step, while another rank of the inner
  /// group has data; default: shadow_step() of each of `inner`. With replicas it must also update
  /// the parameters, for example
  /// `[&] { optimizer.zero_grad(); ddp.shadow_backward(); optimizer.step(); }`. Local. Throws
  /// UsageError if ranks of `inner` are not ranks of `world`.
  void set_join(ProcessGroup world, std::vector<std::reference_wrapper<Joinable>> inner,
                std::function<void()> shadow = {});
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank) override;

 private:
  class [[gnu::visibility("hidden")]] Impl;
  class [[gnu::visibility("hidden")]] InnerJoin;
  std::unique_ptr<Impl> impl_;
  std::unique_ptr<InnerJoin> join_;
};

}  // namespace tessera
#pragma GCC visibility pop
