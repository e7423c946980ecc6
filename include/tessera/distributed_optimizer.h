#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/join.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/process_group.h"
#include "tessera/step/no_sync.h"

namespace tessera {

struct DistributedOptimizerOptions {
  /// "sum" or "mean" of the gradients over the ranks, in any case. Required where a dist_group has
  /// more than one rank.
  std::string reduce_method;
  /// Parameters of rank 0 are given to all: -1 never, 0 once at construction, n > 0 also in every
  /// n-th step(), before the update.
  int64_t bcast_period = 0;
  /// Gradients are sent in packs, in the order in which the first backward produced them; off, one
  /// by one.
  bool param_pack = false;
  /// A pack is closed when it has more bytes than this. > 0
  int64_t param_pack_thd = 10 << 20;
};

/// MegEngine's DistributedOptimizer, around any torch::optim::Optimizer: every rank has the whole
/// model and the whole state; backward reduces the gradients, step() updates.
///
///   tessera::DistributedOptimizer optimizer(*net, world,
///   tessera::default_optimizers().factory("SGD", {{"lr", 0.1}}),
///                                           {.reduce_method = "mean", .param_pack = true});
///   loop: optimizer.zero_grad(); optimizer.backward(loss_of(net(x), y)); optimizer.step();
///
/// Packing: the first backward reduces singly and notes the order of arrival. In the next step()
/// rank 0 publishes the packs: the first 8 gradients alone, then packs of one dtype; what is left
/// over in the order of the dtypes' names. Each parameter group has its own. A pack is sent when it
/// is complete. In a backward in which a rank's gradients come in another order, or one is missing,
/// the packs from there on do not count: all ranks agree on that at the end of the backward, reduce
/// these gradients one by one, and pack anew. Parameters without a gradient on any rank keep none;
/// those that only some ranks used count as zero on the others. One small collective a backward and
/// dist_group tells who used what.
///
/// Construction, backward, step, bcast_param are collective over each dist_group; they block. A
/// group of parameters without a dist_group is not synchronised. After an error in a backward
/// construct anew.
class DistributedOptimizer : public Joinable {
 public:
  using Options = DistributedOptimizerOptions;

  struct Group {
    NamedParameters parameters;
    OptionMap options = {};                       ///< What differs from the factory's defaults.
    std::optional<ProcessGroup> dist_group = {};  ///< None: not synchronised.
  };

  /// All parameters of `module` in one group. UsageError for wrong options, for undefined, sparse,
  /// repeated or no parameters, and, on every rank, when parameters or options differ between ranks
  /// (naming the first difference).
  DistributedOptimizer(const torch::nn::Module& module, ProcessGroup dist_group,
                       const OptimizerFactory& factory, Options options);
  DistributedOptimizer(std::vector<Group> groups, const OptimizerFactory& factory, Options options);
  /// Around an optimizer that exists. `names` has each of its parameters; dist_groups one entry for
  /// each of its groups.
  DistributedOptimizer(std::shared_ptr<torch::optim::Optimizer> optimizer,
                       const NamedParameters& names,
                       std::vector<std::optional<ProcessGroup>> dist_groups, Options options);
  ~DistributedOptimizer() override;

  /// Differentiates, and reduces while it does; on return `.grad` are the reduced ones.
  /// loss.backward() does the same for a loss that depends on at least one of the parameters on
  /// each rank.
  void backward(const at::Tensor& loss);
  /// Broadcasts if it is time, then the optimizer's own step. A closure is for losses that are the
  /// same on all ranks.
  at::Tensor step(const torch::optim::Optimizer::LossClosure& closure = nullptr);
  /// Lets go of gradients, or zeroes them. Local.
  void zero_grad(bool set_to_none = true);
  /// Rank 0's parameters to all ranks of each dist_group.
  void bcast_param();

  /// The optimizer itself: learning-rate schedulers hold this one. Local.
  torch::optim::Optimizer& optimizer();

  /// By parameter name, as of the plain optimizer and interchangeable with it; nothing about packs.
  /// Local.
  OptimizerStateDict state_dict() const;
  void load_state_dict(const OptimizerStateDict& dict);

  /// The packs of a parameter group as parameter names, in the order in which they are sent. Local.
  std::vector<std::vector<std::string>> packs(size_t group) const;

  /// While alive, backward passes accumulate locally and nothing is sent; the next one outside
  /// sends the sum. Local, on all ranks alike.
  [[nodiscard]] NoSync no_sync();

  /// The collectives of one backward of the other ranks, for a rank without data: its gradients
  /// count as zero, and it gets the result.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
