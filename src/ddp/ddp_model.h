#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "sharding/module_buffers.h"
#include "sharding/named_tensor.h"
#include "sharding/shared/shared_parameters.h"
#include "sharding/wrapped_parameters.h"
#include "tessera/distributed_data_parallel.h"

namespace tessera {

inline constexpr const char* kDdpName = "DistributedDataParallel";

/// The module of a DistributedDataParallel: its parameters and buffers, and their checks.
class DdpModel {
 public:
  /// UsageError on every rank for parameters that do not suit. Collective.
  DdpModel(torch::nn::Module& module, ProcessGroup group,
           const DistributedDataParallelOptions& options);
  DdpModel(const DdpModel&) = delete;

  /// Compares parameters, buffers and `option_text` between the ranks. Collective.
  void check_contract(const std::string& option_text);
  /// Deferred parameters are computed, and shared ones moved. Collective.
  void place();
  /// Every rank gets the model of rank `root`. Collective.
  void broadcast(int root);
  void synchronize_buffers() { buffers_.synchronize(group, has_data); }
  void set_active(const JoinIteration& iteration) {
    buffers_.set_active(iteration.first_active, iteration.active_ranks);
  }

  /// Finds out which parameters require a gradient now. Returns whether `trainable` has changed,
  /// which all ranks must see. If none requires one, it stays. Shared parameters that were thawed
  /// get memory of each rank's own. Collective if it changes.
  bool follow_trainability();
  /// After a backward: UsageError on every rank if a parameter was thawed that
  /// follow_trainability() has not seen, as in a module that trains in evaluation mode.
  void check_followed();
  void check_same_parameters();
  void with_shared_write(const std::function<void()>& write);
  int64_t parameter_bytes() const;

  torch::nn::Module& module;
  ProcessGroup group;
  std::vector<sharding::NamedTensor> trainable;
  bool has_data = true;  ///< False on a rank without data in a join.

 private:
  void collect_parameters();
  void divide_parameters();
  void check_sharing() const;
  void share_frozen();
  bool is_shared(const at::Tensor& tensor) const;

  const DistributedDataParallelOptions& options_;
  std::vector<sharding::NamedTensor> all_, frozen_;
  sharding::WrappedParameters wrapped_;
  std::unique_ptr<sharding::SharedParameters> shared_;  // null without share_parameters
  sharding::ModuleBuffers buffers_;
};

}  // namespace tessera
