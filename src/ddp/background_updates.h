#pragma once

#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/optim/optimizer.h>

#include "optim/late_updates.h"
#include "sharding/detection/arriving_pages.h"
#include "sharding/named_tensor.h"

namespace tessera {

/// [Note: updates in the background] A step that does not wait for gradients under way. The update
/// of a parameter follows the reduction of its bucket. Until then the parameter and its optimizer
/// state have no memory, as the gradient: see [Note: pages that arrive in the background]. All
/// members are local.
class BackgroundUpdates : public optim::LateUpdates {
 public:
  /// Of the contiguous float32 ones of `parameters`. Each moves to a page of `arriving`, which
  /// outlives this object, at its first late update; its memory stays the same. Not while another
  /// tensor uses its memory too: that one would not notice a late update.
  BackgroundUpdates(const std::vector<sharding::NamedTensor>& parameters,
                    sharding::ArrivingPages& arriving);
  /// Blocks until everything under way is complete.
  ~BackgroundUpdates() override;
  BackgroundUpdates(const BackgroundUpdates&) = delete;

  bool can_follow(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) override;
  void follow(FusedOptimizer& optimizer, const std::vector<at::Tensor>& parameters) override;
  void stepped() override { used_ = true; }
  /// True if stepped() was ever called.
  bool used() const { return used_; }

 private:
  struct Entry {
    std::unique_ptr<sharding::Page> page;
    std::map<std::string, std::unique_ptr<sharding::Page>> states;  // by name of the state tensor
  };

  Entry* find(const at::Tensor& parameter);
  std::unique_ptr<sharding::Page> move_to_page(at::Tensor tensor);
  std::vector<sharding::Page*> pages_of(const torch::optim::Optimizer& optimizer,
                                        const at::Tensor& parameter);

  sharding::ArrivingPages& arriving_;
  std::unordered_map<c10::TensorImpl*, Entry> entries_;
  bool used_ = false;
};

}  // namespace tessera
