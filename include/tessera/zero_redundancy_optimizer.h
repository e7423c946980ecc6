#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include "tessera/detail/default_group.h"
#include "tessera/join.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/partition.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/buffer_sync.h"
#include "tessera/step/clip_grad.h"
#include "tessera/step/no_sync.h"
#include "tessera/step/overlap.h"
#include "tessera/step/step_end.h"

#pragma GCC visibility push(default)
namespace tessera {

namespace zero {
struct TrainerAccess;
}

/// Options of ZeroRedundancyOptimizer. Every rank gives the same values. docs/zero.md says what
/// each one costs and which exclude each other; such a pair is a UsageError at construction.
struct ZeroRedundancyOptimizerOptions {
  /// The distribution of parameters over the ranks. `flat` balances best and needs an element-wise
  /// optimizer; the other partitions work with any optimizer.
  Partition partition = Partition::flat;
  /// True: parameters become windows of one contiguous buffer, which one collective gathers in
  /// place. False: parameters keep their storage, and each gather goes through a copy.
  bool parameters_as_bucket_view = true;
  /// True: the optimizer averages the gradients over the ranks. False: `.grad` is averaged before
  /// step(), by the caller or by a DistributedDataParallel, which switches the option off.
  bool reduce_gradients = true;
  /// The time of reductions and gathers.
  Overlap overlap = Overlap::backward;
  /// Size of a bucket that is reduced within backward, in MiB of parameters, > 0. At most 8 MiB are
  /// used without shard_gradients.
  double bucket_cap_mb = 25;
  /// Every rank gets rank 0's parameters and buffers at construction.
  bool broadcast_parameters = true;
  /// The rule by which all ranks get the same buffers in each step(). See track_buffers(). No
  /// effect while a DistributedDataParallel has the parameters: its own rule applies then.
  BufferSync buffers = BufferSync::broadcast;
  /// Stage 2 of ZeRO: backward reduces each bucket when it is complete, and frees its memory.
  /// `.grad` of shards() is then this rank's part of the mean; `.grad` of the parameters is a
  /// placeholder.
  bool shard_gradients = false;
  /// The ranks of a host have one copy of the parameters, frozen ones too, in memory that all of
  /// them map. Writes outside of step() go through with_shared_write().
  bool share_parameters = false;
  /// The format of gradients and updated parameters between hosts. The rounding error of a
  /// parameter is state "wire_residual" of its owner. With LBFGS parameters travel exactly.
  WireOptions wire = {};
};

/// ZeRO stage 1, and 2 with shard_gradients (Rajbhandari et al., 2020), around a
/// torch::optim::Optimizer: an element-wise one with every partition, another one with whole
/// parameters. Each rank keeps the optimizer state of its own part of the parameters and updates
/// that part; then every rank receives the parts of the others.
///
///   auto adamw = tessera::default_optimizers().factory("AdamW", {{"lr", 1e-3}});
///   tessera::ZeroRedundancyOptimizer optimizer(*model, world, adamw);
///   // in the loop:
///   loss.backward();
///   optimizer.step();
///   optimizer.zero_grad();
///
/// It is itself a torch::optim::Optimizer with the caller's param_groups(), so a scheduler that
/// holds it works unchanged.
///
/// Collective and blocking, called by all ranks in the same order: construction, step,
/// add_param_group, clip_grad_norm_, clip_grad_value_, gather_parameters, consolidate_state_dict,
/// with_shared_write. All other members are local, unless their comment says otherwise.
///
/// Gradients, without shard_gradients: `.grad` is the gradient of this rank's own data. The mean
/// over the ranks exists only inside, at its owner.
///
/// With reduce_gradients in a world of more than one rank these usual lines are different:
///   - `clip_grad_norm_(net->parameters(), 1)`, libtorch's function, is a UsageError on every rank,
///     because each rank would scale by its own norm: optimizer.clip_grad_norm_(1). The error
///     follows from the operators: a norm (norm, abs, pow, square) of every `.grad` and then mul_
///     by a tensor; or operators that read every `.grad`, and then products or quotients, in place
///     or not, with numbers (or CPU tensors of one element) that differ between ranks, which step()
///     compares. After reading all `.grad`s for a log, scale by a number that is equal on all
///     ranks.
///   - `clip_grad_value_(net->parameters(), 1)` limits this rank's own gradient;
///     optimizer.clip_grad_value_(1) limits the mean.
///   - `grad.norm()` is the norm of this rank's own gradient; optimizer.clip_grad_norm_(INFINITY)
///     returns that of the mean.
///
/// Dynamic loss scaling: after the last backward of a step and before clipping, each rank
/// multiplies its `.grad`s by 1 / scale, and the ranks agree on whether any of them is infinite. If
/// so, call zero_grad() instead of step(). With shard_gradients the gradients are `.grad` of
/// shards(), so an infinite value on one rank is infinite in the mean too. With wire.gradients too,
/// call end_step() when the scale changes.
///
/// Memory of a rank, for P bytes of parameters and W ranks: P for parameters, P for gradients, and
/// 1/W of the optimizer state; with shard_gradients P/W and two buckets for gradients. Clipping, or
/// reductions within backward: P/W more. With share_parameters the L ranks of a host have P bytes
/// of parameters together.
class ZeroRedundancyOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  using Options = ZeroRedundancyOptimizerOptions;

  /// Parameters that share options. Empty `options`: the factory's defaults.
  struct Group {
    NamedParameters parameters;
    OptionMap options;
  };

  /// Shards the optimizer state of all parameters of `module`, under their names. UsageError for
  /// undefined, sparse, repeated or no parameters (naming group and index), for a partition that
  /// does not suit the optimizer, and, on every rank, when parameters differ between ranks (naming
  /// the first difference).
  ZeroRedundancyOptimizer(const torch::nn::Module& module, ProcessGroup group,
                          OptimizerFactory factory, Options options = {});
  /// The same for parameter groups of `module`, whose buffers are kept equal.
  ZeroRedundancyOptimizer(const torch::nn::Module& module, std::vector<Group> groups,
                          ProcessGroup group, OptimizerFactory factory, Options options = {});
  /// The same without buffers: where a module has some, call track_buffers(). Otherwise the first
  /// step() says so in the log of rank 0. Parameters without names: numbered_parameters().
  ZeroRedundancyOptimizer(std::vector<Group> groups, ProcessGroup group, OptimizerFactory factory,
                          Options options = {});
  /// The same three in default_process_group(). UsageError if there is none.
  ZeroRedundancyOptimizer(const torch::nn::Module& module, OptimizerFactory factory,
                          Options options = {});
  ZeroRedundancyOptimizer(const torch::nn::Module& module, std::vector<Group> groups,
                          OptimizerFactory factory, Options options = {});
  ZeroRedundancyOptimizer(std::vector<Group> groups, OptimizerFactory factory,
                          Options options = {});
  ~ZeroRedundancyOptimizer() override;

  /// Averages the gradients, updates this rank's shards, gathers all shards. Options (lr, …) are
  /// read from param_groups().
  ///
  /// `closure` computes the loss and its gradients. An element-wise optimizer calls it once. Other
  /// optimizers (LBFGS) may call it several times: each call sees current parameters, its gradients
  /// are averaged, and all ranks make the same number of calls. Returns the closure's loss; without
  /// a closure an undefined tensor. If the closure throws on a rank, that rank rethrows, and the
  /// others throw UsageError with its message.
  ///
  /// torch::optim::LBFGS uses all parameters at once. Rank 0 then owns all of them and has the
  /// whole state; the result is that of LBFGS with the averaged gradients.
  ///
  /// A parameter that is frozen for some steps keeps its owners and its state. A parameter that was
  /// frozen at construction gets owners in the first step or clipping after it has become
  /// trainable; with LBFGS that is a UsageError. UsageError on every rank when a parameter's
  /// storage was replaced, when another function than add_param_group(Group) added a group, and
  /// when options (lr, …) or trainable parameters differ between ranks.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// `.grad` of every parameter becomes undefined, or zero where `set_to_none` is false. Local.
  /// (Hides torch's zero_grad, which differs between libtorch versions.)
  void zero_grad(bool set_to_none = true);

  /// With wire.gradients, between step(), or zero_grad() instead of it, and the next backward:
  /// tells how the step ended, for loss scaling. step() and zero_grad() determine `end.used`.
  /// `end.scale` has no effect without shard_gradients, where gradients are unscaled before they
  /// are rounded. UsageError unless it is finite and > 0. Local; does not block. All ranks make the
  /// same calls.
  void end_step(StepEnd end);

  /// Scales the mean gradient so that its p-norm is at most `max_norm`; returns the norm before.
  /// With infinity nothing is scaled. `norm_type` is 1, 2, infinity or any p > 0. Call it between
  /// backward and step().
  GradNorm clip_grad_norm_(double max_norm, double norm_type = 2);
  /// Limits every element of the mean gradient to [-clip_value, clip_value]; NaN stays NaN. Call it
  /// between backward and step(), before or after clip_grad_norm_: the gradient is averaged once.
  /// UsageError for a `clip_value` that is negative or NaN.
  void clip_grad_value_(double clip_value);

  /// All ranks get rank 0's buffers of `module` now (unless broadcast_parameters is off), and
  /// step() applies the option `buffers` from now on. The constructors with a module have called
  /// it. Collective.
  void track_buffers(const torch::nn::Module& module);

  /// Adds a parameter group with a partition of its own; existing shards do not move. UsageError
  /// between clipping and step().
  void add_param_group(Group group);

  /// Gathers the whole optimizer state to the CPU of rank `to`, or of every rank if `to` is
  /// negative, one tensor at a time: on other ranks the largest tensor is the peak. state_dict()
  /// then returns it there.
  void consolidate_state_dict(int to = 0);
  /// The result of the last consolidate_state_dict(). Local. UsageError on a rank that has none.
  const OptimizerStateDict& state_dict() const;
  /// For torch::save(optimizer, path): writes the result of the last consolidate_state_dict() in
  /// the format of the plain optimizer over the same parameters, which can load it. Local.
  /// UsageError on a rank that has no such result.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// For torch::load(optimizer, path): reads what save() or the plain optimizer has written, and
  /// takes this rank's part. Local; all ranks read the same archive.
  void load(torch::serialize::InputArchive& archive) override;
  /// The options and the state of this rank's own shards, by parameter name. With Partition::flat a
  /// tensor has the elements of the shard only, in one dimension. Local. With `rank`: those of
  /// another rank, from the result of consolidate_state_dict(); UsageError without it.
  OptimizerStateDict rank_local_state_dict(std::optional<int> rank = {}) const;
  /// For each rank the ranges of elements that it owns. The same on every rank. Local.
  std::vector<std::vector<ElementRange>> partition() const;
  /// Copies this rank's part of `dict` into its shards. `dict` is the same on all ranks; it may
  /// come from any world size or from the plain optimizer. Its options replace those in
  /// param_groups(). `strict`: as the function load_state_dict() of optimizers. Local.
  void load_state_dict(const OptimizerStateDict& dict, bool strict = true);

  /// The elements that this rank updates, over all groups, in the order of the parameters; empty
  /// shards are left out. `tensor` aliases the parameter. Shards stay valid; add_param_group, and a
  /// parameter that was frozen at construction and becomes trainable, add further ones. With
  /// shard_gradients: UsageError from the first backward to the first step() of such a parameter,
  /// because its gradient is not among theirs. Local.
  std::vector<ParameterShard> shards() const;
  /// The optimizer state of shards(), as tessera::state_slices; also of parameters that are frozen
  /// now. On rank 0 that of parameters that have been frozen since construction follows. Local.
  std::vector<StateSlice> state_slices() const;
  /// Loads the state of shards(), as tessera::load_state_slices. A parameter that has been frozen
  /// since construction gets the state of its slice of all elements when it becomes trainable;
  /// without such a slice it counts as never stepped. Options stay as they are: see groups(). Drops
  /// each tensor of `slices` when it has been copied. Local.
  void load_state_slices(std::vector<StateSlice> slices);
  /// Every rank receives each shard's values from its owner. For use after a write to shards, for
  /// example when they are loaded or exchanged for averages. Collective: one all-gather a bucket.
  void gather_parameters();
  /// Returns when all parameters have arrived: with Overlap::background some may not have after
  /// step(). Call it before code that uses data_ptr() of a parameter, and before torch::save() of
  /// the module. BrokenWorldError if a gather failed. Local; blocks.
  void wait() const;
  /// Runs `write`, which changes parameters of this optimizer in place, for example by
  /// load_state_dict(). With share_parameters it runs when all ranks have made this call, on the
  /// first rank of each host. Rank 0 then broadcasts the tracked buffers, because `write` may have
  /// changed them too; other changes do not reach the other ranks. Otherwise it runs on every rank.
  /// `write` runs without gradients and calls no collective. If it throws on a rank, every rank
  /// throws AgreedError. Collective; returns when all ranks may read.
  void with_shared_write(const std::function<void()>& write);
  /// With share_parameters: returns when all ranks have called it, so that none of them reads
  /// parameters. Waits as wait(). Call it before a write to shards(), and gather_parameters()
  /// after. Collective with share_parameters, otherwise local.
  void wait_for_readers();
  /// The groups with their current options and the names of their parameters, frozen ones too.
  /// set_options() writes options back into param_groups(). Local.
  std::vector<OptimizerStateDict::Group> groups() const;

  /// While the returned object is alive, backward passes accumulate locally and nothing is sent.
  /// Local; all ranks must use it in the same way.
  [[nodiscard]] NoSync no_sync();

  /// In a join, on a rank without data: makes the collectives of one backward of the other ranks.
  /// Call step() afterwards as they do, which updates this rank's own shards. Collective with
  /// shard_gradients, otherwise local.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank) override;

  /// Bytes on this rank. With share_parameters the parameters are this rank's equal part of the
  /// host's copy, so that the sum over the ranks of a host counts them once. Local.
  struct Memory {
    int64_t parameters = 0, gradients = 0, optimizer_state = 0;
  };
  Memory memory() const;

  /// Reductions of buckets since construction. Local.
  struct Reductions {
    int64_t in_backward = 0;  ///< That began within a backward.
    int64_t in_step = 0;      ///< In step() or for clipping.
  };
  Reductions reductions() const;

  const Options& options() const;

 private:
  class [[gnu::visibility("hidden")]] Impl;
  friend struct zero::TrainerAccess;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#pragma GCC visibility pop
