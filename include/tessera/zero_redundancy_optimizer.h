#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/join.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/partition.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/no_sync.h"

namespace tessera {

struct ZeroRedundancyOptimizerOptions {
  /// Who holds which part. `flat` balances best and needs an element-wise optimizer; others work
  /// with any.
  Partition partition = Partition::flat;
  /// Parameters become windows of one contiguous buffer, gathered in place in one collective. Off,
  /// they keep their storage and each gather goes through a copy. The numbers are the same.
  bool parameters_as_bucket_view = true;
  /// The optimizer averages the gradients over the ranks itself, by a reduce-scatter to their
  /// owners: no DistributedDataParallel is needed, and traffic is 2 (W-1)/W parameter bytes a step
  /// instead of 3. Off: `.grad` is already averaged, by DistributedDataParallel or by the caller.
  bool reduce_gradients = true;
  /// With reduce_gradients: each bucket is reduced, updated and gathered as soon as backward has
  /// produced its gradients; step() then only waits. The result is the same, bit by bit. Not with
  /// clipping, nor with optimizers that need a closure. Gradient accumulation: no_sync(). Options
  /// (lr) that change between backward and step() are an error.
  bool overlap_with_backward = false;
  /// Size of a bucket when overlapping, in MiB of parameters.
  double bucket_cap_mb = 25;
  /// Parameters may get no gradient. Those that no rank used are skipped, as by a plain optimizer.
  /// Off, with overlap_with_backward a missing gradient is an error on every rank, and one small
  /// collective a bucket is saved.
  bool find_unused_parameters = true;
  /// Parameters of rank 0 are given to all at construction.
  bool broadcast_parameters = true;
};

/// ZeRO stage 1 and 2 (Rajbhandari et al., 2020) around any torch::optim::Optimizer: every rank
/// keeps the optimizer state of, and updates, only its part of the parameters; then all receive the
/// others' parts.
///
///   tessera::ZeroRedundancyOptimizer optimizer(*model, world,
///   tessera::default_optimizers().factory("AdamW", {{"lr", 1e-3}})); loop: loss.backward();
///   optimizer.step(); optimizer.zero_grad();
///
/// Is itself a torch::optim::Optimizer, whose param_groups() are the caller's: schedulers that hold
/// it just work. The gradients in `.grad` stay those of this rank's own data. Construction, step,
/// add_param_group, clip_grad_norm_, clip_grad_value_, gather_parameters, consolidate_state_dict
/// and load_state_dict are collective: all ranks call them, in the same order. They block. Dynamic
/// loss scaling: between the last backward of a step and clipping, each rank multiplies its
/// `.grad`s by 1 / scale, and the ranks agree whether any has an infinity; then zero_grad() in
/// place of step(). Not with overlap_with_backward, which has no such moment. Memory per rank, P
/// parameter bytes, W ranks: P parameters, P gradients, optimizer state / W.
class ZeroRedundancyOptimizer : public torch::optim::Optimizer, public Joinable {
 public:
  using Options = ZeroRedundancyOptimizerOptions;

  /// Parameters that share options. `options` empty: the factory's defaults.
  struct Group {
    NamedParameters parameters;
    OptionMap options;
  };

  /// All parameters of `module`, by their names. UsageError for undefined, sparse, repeated or no
  /// parameters (naming group and index), for a partition that does not suit the optimizer, and, on
  /// every rank, when parameters differ between ranks (naming the first difference).
  ZeroRedundancyOptimizer(const torch::nn::Module& module, ProcessGroup group,
                          OptimizerFactory factory, Options options = {});
  ZeroRedundancyOptimizer(std::vector<Group> groups, ProcessGroup group, OptimizerFactory factory,
                          Options options = {});
  ~ZeroRedundancyOptimizer() override;

  /// Reduces, updates own part, gathers. `closure` is called once for element-wise optimizers;
  /// others (LBFGS) may call it several times, on each call with current parameters and reduced
  /// gradients, and as often on all ranks. Returns its loss. Hyper-parameters are read from
  /// param_groups(). A changed requires_grad re-partitions, with a warning.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// Lets go of gradients, or zeroes them. Local. (Hides torch's, which differs between its
  /// versions.)
  void zero_grad(bool set_to_none = true);

  /// Scales the averaged gradient so that its p-norm (2, 1, infinity or any p > 0) is at most
  /// `max_norm`; returns the norm before. Between backward and step().
  double clip_grad_norm_(double max_norm, double norm_type = 2);
  /// Limits every element of the averaged gradient to [-clip_value, clip_value]; NaNs stay. Between
  /// backward and step(); it and clip_grad_norm_ may follow each other, the gradient is reduced
  /// once. UsageError for a clip_value that is negative or no number.
  void clip_grad_value_(double clip_value);
  /// clip_grad_norm_ without scaling.
  double grad_norm(double norm_type = 2);
  /// step() then also takes the 2-norm of the averaged gradient, in its one pass; last_grad_norm()
  /// returns it. Collective switch.
  void track_grad_norm(bool track);
  double last_grad_norm() const;

  /// A further group, with its own partition; what exists does not move.
  void add_param_group(Group group);

  /// Gathers the state to the CPU of rank `to`, or of all (to < 0), tensor by tensor: peak extra
  /// memory elsewhere is one tensor. state_dict() then returns it there.
  void consolidate_state_dict(int to = 0);
  /// What consolidate_state_dict() gathered. Local. UsageError on a rank that has none.
  const OptimizerStateDict& state_dict() const;
  /// Takes this rank's part of `dict` (the same on all ranks, from any world size or a plain
  /// optimizer), copying. Loaded hyper-parameters win.
  void load_state_dict(const OptimizerStateDict& dict);

  /// What this rank updates, over all groups, in the order of the parameters; empty shards are left
  /// out. `tensor` aliases the parameter. Good until add_param_group, or the first step() or
  /// clipping after a change of requires_grad. Local.
  std::vector<ParameterShard> shards() const;
  /// The state of shards(), as tessera::state_slices. Parameters that are frozen now have none.
  /// Local. With overlap_with_backward not between backward and step(): UsageError; nor are the
  /// next two.
  std::vector<StateSlice> state_slices() const;
  /// As tessera::load_state_slices into shards(); parameters that are frozen now are as never
  /// stepped. Hyper-parameters stay: see groups(). Local.
  void load_state_slices(const std::vector<StateSlice>& slices);
  /// All ranks get the values that each shard's owner has: for when somebody has written into
  /// shards, as by loading them or by exchanging them for averages. One all-gather a bucket.
  void gather_parameters();
  /// The groups, frozen parameters too, by name, and their options as they are now. set_options()
  /// puts options back into param_groups(). Local.
  std::vector<OptimizerStateDict::Group> groups() const;

  /// While alive, backward passes accumulate locally and nothing is sent. Local, on all ranks
  /// alike.
  [[nodiscard]] NoSync no_sync();

  /// What one backward of the other ranks asks of a rank without data; then it calls step() as they
  /// do, which updates its own part. Collective with overlap_with_backward, else local.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank) override;

  /// Bytes on this rank: parameters, gradients, optimizer state. Local.
  struct Memory {
    int64_t parameters = 0, gradients = 0, optimizer_state = 0;
  };
  Memory memory() const;

  /// Elements of which this rank keeps the state, by parameter name. Local.
  std::vector<std::pair<std::string, int64_t>> owned() const;

  const Options& options() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
