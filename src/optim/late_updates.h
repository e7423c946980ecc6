#pragma once

#include <vector>

#include "tessera/optim/fused_optimizer.h"

namespace tessera::optim {

/// Updates parameters after step() has returned, when their gradients have arrived. Its owner
/// registers it for these parameters.
class LateUpdates {
 public:
  virtual ~LateUpdates() = default;
  /// True if `parameter`, whose gradient has no memory yet, can be updated later. Local.
  virtual bool can_follow(const torch::optim::Optimizer& optimizer,
                          const at::Tensor& parameter) = 0;
  /// `parameters`, of which can_follow() is true, are updated when their gradients have arrived, by
  /// the options that `optimizer` has now. Local; does not block.
  virtual void follow(FusedOptimizer& optimizer, const std::vector<at::Tensor>& parameters) = 0;

  /// A fused optimizer of some of the parameters has made a step. Local.
  virtual void stepped() = 0;

  /// The late updates of `parameter`; null if there are none. From any thread.
  static LateUpdates* of(const at::Tensor& parameter);

 protected:
  void add(const at::Tensor& parameter);
  /// For the destructor: this object makes no more updates.
  void remove_all();
};

}  // namespace tessera::optim
