#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed_optimizer/packed_reduction.h"
#include "sharding/module_buffers.h"
#include "sharding/wrapped_parameters.h"
#include "tessera/distributed_optimizer.h"

namespace tessera {

namespace distributed_optimizer {

/// UsageError for parameters of group `index` that do not suit, or that are among those of earlier
/// groups, `known`.
void check_group(const NamedParameters& parameters, const NamedParameters& known, size_t index,
                 int rank);

}  // namespace distributed_optimizer

/// Validates the options and the parameters, compares them between ranks, and broadcasts the
/// parameters. PackedReduction reduces the gradients.
class DistributedOptimizer::Impl {
 public:
  static constexpr const char* kName = "DistributedOptimizer";

  Impl(std::shared_ptr<torch::optim::Optimizer> optimizer, const NamedParameters& names,
       const std::vector<std::optional<ProcessGroup>>& dist_groups, Options options);

  /// A parameter group and its dist_group.
  struct SyncedGroup {
    ProcessGroup group;
    size_t parameter_group;           ///< Its index in the optimizer.
    std::vector<at::Tensor> tensors;  ///< All parameters, also the frozen ones.
    std::vector<sharding::NamedTensor> trainable, frozen;
  };

  /// Collective over all dist_groups.
  void add_param_group(Group added);
  /// Refuses parameter groups that were added to the optimizer itself after construction.
  void check_groups();
  /// Parameters that were frozen and require a gradient now get hooks and packs, which all ranks
  /// must see. `reduced`: the other gradients are reduced already, so those of the thawed ones are
  /// reduced here, unless they were with the others. Collective if there are such parameters.
  void follow_thaw(bool reduced);
  void set_join(const JoinIteration& iteration);
  /// Sends rank `root`'s parameters to all ranks of each dist_group.
  void broadcast(int root);
  /// The start of an error message, with the rank if it is known.
  std::string prefix() const;

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  NamedParameters names_;
  Options options_;
  std::vector<SyncedGroup> synced_;
  std::optional<distributed_optimizer::ThawedGradients> thawed_;  ///< Of the frozen parameters.
  std::unique_ptr<distributed_optimizer::PackedReduction> reduction_;  ///< Null: nothing to reduce.
  /// The ranks that get the same buffers: the first dist_group of several ranks.
  ProcessGroup& buffer_group();
  sharding::ModuleBuffers buffers_;
  bool no_module_ = true;  ///< track_buffers() was not called.
  bool has_data_ = true;   ///< False on a rank without data in a join.
  int64_t steps_ = 0;

 private:
  static ProcessGroup world(size_t index);
  void add_group(size_t index, ProcessGroup group);
  void check_options();
  void prepare(SyncedGroup& synced);
  void check_contract(SyncedGroup& synced) const;
  std::string option_text(size_t parameter_group) const;
  bool reduces(const SyncedGroup& synced) const;
  void make_reduction();
  void mark_reduced();
  std::vector<sharding::NamedTensor> take_thawed(SyncedGroup& synced);
  void refuse_own_gradients(SyncedGroup& synced,
                            const std::vector<sharding::NamedTensor>& parameters) const;
  void reduce(SyncedGroup& synced, const std::vector<sharding::NamedTensor>& parameters) const;

  bool mean_ = false;
  std::vector<sharding::WrappedParameters> wrapped_;
  std::optional<JoinIteration> join_;
};

}  // namespace tessera
