#pragma once

#include <utility>
#include <vector>

#include <torch/utils.h>

namespace tessera::train {

/// The values that a module's buffers had before a step, so that the step can be taken back. Every
/// buffer is copied in every step: batch norm writes its statistics without a change of their
/// version counter, so a written buffer cannot be distinguished from an unchanged one. Local.
class StepBuffers {
 public:
  StepBuffers() = default;  ///< of no buffer
  explicit StepBuffers(std::vector<at::Tensor> buffers) : live_(std::move(buffers)) {
    const torch::NoGradGuard no_grad;
    for (const auto& buffer : live_) saved_.push_back(buffer.detach().clone());
  }

  void keep() { copy(live_, saved_); }
  /// Gives the buffers the values that they had at the last keep().
  void restore() { copy(saved_, live_); }

 private:
  static void copy(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }

  std::vector<at::Tensor> live_, saved_;
};

}  // namespace tessera::train
