#pragma once

#include <iterator>
#include <utility>
#include <vector>

#include <torch/types.h>

namespace tessera::fsdp {

/// With cpu_offload: sums on their way from the device to gradients on the host, in pinned memory.
/// The host waits for the device once for all of them, and then adds and scales them. Not
/// thread-safe.
class HostSums {
 public:
  /// Issues the copy of `sum` on the current stream. Later the sum, times `scale`, is added to
  /// `target` or replaces it.
  void send(const at::Tensor& target, const at::Tensor& sum, bool add, double scale) {
    const auto pinned = sum.options().device(target.device()).pinned_memory(true);
    // A copy that converts would make the host wait.
    const bool apart = add || sum.scalar_type() != target.scalar_type();
    const auto arrived = apart ? at::empty(sum.sizes(), pinned) : at::Tensor();
    auto to = apart ? arrived : target;
    to.copy_(sum, /*non_blocking=*/true);
    all_.push_back({target, arrived, add, scale});
  }
  void take(HostSums& other) {
    std::move(other.all_.begin(), other.all_.end(), std::back_inserter(all_));
    other.all_.clear();
  }
  bool empty() const { return all_.empty(); }
  /// The copies have come.
  void apply() {
    const at::NoGradGuard no_grad;
    for (auto& [target, arrived, add, scale] : std::exchange(all_, {})) {
      if (add) {
        target.add_(arrived, scale);
      } else {
        if (arrived.defined()) target.copy_(arrived);
        target.mul_(scale);
      }
    }
  }

 private:
  struct Sum {
    at::Tensor target;
    at::Tensor arrived;  // undefined: it is in `target`
    bool add;
    double scale;
  };
  std::vector<Sum> all_;  // in the order of the reductions
};

}  // namespace tessera::fsdp
