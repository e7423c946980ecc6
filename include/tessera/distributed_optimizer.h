#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/join.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/process_group.h"
#include "tessera/step/buffer_sync.h"
#include "tessera/step/no_sync.h"
#include "tessera/step/overlap.h"
#include "tessera/step/step_end.h"

#pragma GCC visibility push(default)
namespace tessera {

struct DistributedOptimizerOptions {
  /// "sum" or "mean" of the gradients over the ranks; upper and lower case are equal. Required if a
  /// dist_group has more than one rank.
  std::string reduce_method;
  /// The period of broadcasts of rank 0's parameters to all ranks. -1: none. 0: once, at
  /// construction. n > 0: at construction and in every n-th step(), before the update.
  int64_t bcast_period = 0;
  /// On: gradients are sent in packs, in the order in which the first backward pass produced them.
  /// Off: in buckets of up to 25 MiB, from the last parameter to the first. The bits are the same.
  bool param_pack = false;
  /// A pack is closed when it has more bytes than this. > 0
  int64_t param_pack_thd = 10 << 20;
  /// `backward` and `background`: each pack is reduced as soon as it is complete. `none`: at the
  /// end of backward. All is done when backward() returns.
  Overlap overlap = Overlap::backward;
  /// The rule by which all ranks get the same buffers, in each step(). See track_buffers().
  BufferSync buffers = BufferSync::broadcast;
  /// The format of gradients between hosts. Both halves of the all-reduce are rounded. UsageError
  /// for wire.parameters.
  WireOptions wire = {};
};

/// Data parallelism around any torch::optim::Optimizer, as in MegEngine's DistributedOptimizer.
/// Every rank has the whole model and the whole optimizer state. backward() reduces the gradients
/// while it computes them, and step() updates the parameters.
///
///   tessera::DistributedOptimizer optimizer(
///       *net, world, tessera::default_optimizers().factory("SGD", {{"lr", 0.1}}),
///       {.reduce_method = "mean", .param_pack = true});
///   loop: optimizer.zero_grad(); optimizer.backward(loss_of(net(x), y)); optimizer.step();
///
/// Packing: the first backward pass reduces each gradient by itself and records the order in which
/// the gradients arrive. In the next step() rank 0 publishes the packs: the first 8 gradients form
/// a pack each, then packs of one dtype are filled, and the remaining gradients follow in the order
/// of the dtypes' names. Each parameter group has its own packs. A pack is sent when it is
/// complete. If in a later backward pass a gradient of some rank arrives in another order, or is
/// missing, that pack and all later ones are invalid: at the end of the backward pass all ranks
/// agree on these packs, reduce their gradients one by one, and form new packs in the next step().
/// A parameter without a gradient on any rank keeps none; if only some ranks have a gradient, it
/// counts as zero on the others. One small collective for each backward pass and dist_group
/// determines which rank has which gradients.
///
/// Construction, backward(), step() and bcast_param() are collective over each dist_group and
/// block. After an error in a backward pass or in add_param_group(), construct a new
/// DistributedOptimizer.
///
/// With reduce_method "sum" a `.grad` that was reduced must be cleared before the next backward
/// pass that synchronises; otherwise every rank throws UsageError.
class DistributedOptimizer : public Joinable {
 public:
  using Options = DistributedOptimizerOptions;

  struct Group {
    NamedParameters parameters;
    OptionMap options = {};  ///< Options that differ from the factory's defaults.
    /// Ranks over which the group's gradients are reduced. Empty: all ranks, as
    /// default_process_group(), and a UsageError if there is none. ProcessGroup(): the group is not
    /// synchronised.
    std::optional<ProcessGroup> dist_group = {};
  };

  /// Puts all parameters of `module` into one group. Throws UsageError for options out of range,
  /// for undefined, sparse or repeated parameters and if there are none. If parameters or options
  /// differ between ranks, every rank throws UsageError naming the first difference.
  DistributedOptimizer(const torch::nn::Module& module, ProcessGroup dist_group,
                       const OptimizerFactory& factory, Options options);
  /// The same in default_process_group(). UsageError if there is none.
  DistributedOptimizer(const torch::nn::Module& module, const OptimizerFactory& factory,
                       Options options);
  /// The same for parameter groups of `module`, whose buffers are kept equal.
  DistributedOptimizer(const torch::nn::Module& module, std::vector<Group> groups,
                       const OptimizerFactory& factory, Options options);
  /// The same without buffers: where a module has some, call track_buffers(). Otherwise the first
  /// step() says so in the log of rank 0.
  DistributedOptimizer(std::vector<Group> groups, const OptimizerFactory& factory, Options options);
  /// Wraps an existing optimizer. `names` must contain each of its parameters, `dist_groups` one
  /// entry for each of its parameter groups; an empty entry is as an empty Group::dist_group.
  DistributedOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                       const NamedParameters& names,
                       std::vector<std::optional<ProcessGroup>> dist_groups, Options options);
  ~DistributedOptimizer() override;

  /// Adds a parameter group, as construction does. The other groups keep their optimizer state, and
  /// new packs are made. Gradients that the parameters of `group` have already are reduced. With
  /// reduce_method "sum", clear all gradients before the next backward pass. UsageError as at
  /// construction, and while no_sync() holds. Collective over all dist_groups; blocks.
  void add_param_group(Group group);

  /// All ranks of the first dist_group of several ranks get rank 0's buffers of `module` now, and
  /// step() applies the option `buffers` from now on. The constructors with a module have called
  /// it. Collective.
  void track_buffers(const torch::nn::Module& module);

  /// Computes and reduces the gradients; on return each `.grad` is the reduced gradient.
  /// Collective. loss.backward() does the same if the loss depends on at least one parameter on
  /// each rank.
  void backward(const at::Tensor& loss);
  /// Broadcasts the parameters if bcast_period says so, then calls the optimizer's step(). Use a
  /// closure only for a loss that is the same on all ranks. Collective.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  /// Makes the gradients undefined, or sets them to zero if `set_to_none` is false. Local.
  /// Gradients that no step() has used are dropped. With wire.gradients, the next ones then get the
  /// rounding errors of the last step()'s gradients and not those of the dropped ones.
  void zero_grad(bool set_to_none = true);
  /// With wire.gradients, between step(), or zero_grad() instead of it, and the next backward:
  /// tells how the step ended, for loss scaling. step() and zero_grad() determine `end.used`.
  /// UsageError unless `end.scale` is finite and > 0. Local; does not block. All ranks make the
  /// same calls.
  void end_step(StepEnd end);
  /// Broadcasts rank 0's parameters to all ranks of each dist_group. Collective.
  void bcast_param();

  /// Returns at once: see option overlap.
  void wait() const {}

  /// The wrapped optimizer. Pass it to learning-rate schedulers. Local.
  torch::optim::Optimizer& optimizer();

  /// The state of the wrapped optimizer, by parameter name. It can be loaded into the plain
  /// optimizer and contains nothing about packs. Local.
  OptimizerStateDict state_dict() const;
  /// `strict`: as the function load_state_dict() of optimizers.
  void load_state_dict(const OptimizerStateDict& dict, bool strict = true);

  /// The packs of a parameter group, as parameter names, in the order in which they are sent.
  /// Local.
  std::vector<std::vector<std::string>> packs(size_t group) const;

  /// While the result is alive, backward passes accumulate gradients locally and send nothing; the
  /// next backward pass outside sends the sum. Use it on all ranks in the same way. Local.
  [[nodiscard]] NoSync no_sync();

  /// For a rank without data: makes the collectives of one backward pass of the other ranks. This
  /// rank's gradients count as zero, and it gets the result. Collective.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank) override;

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#pragma GCC visibility pop
