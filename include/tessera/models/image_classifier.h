#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/process_group.h"

// A small residual network for images (He et al., 2016, the shape of those for CIFAR) as a plain
// module.

namespace tessera {

struct ImageClassifierOptions {
  int64_t in_channels = 1;
  int64_t channels =
      16;              ///< of the first block; each further block doubles them and halves the image
  int64_t blocks = 2;  ///< residual blocks of two 3 x 3 convolutions, 1 to 8
  int64_t classes = 10;  ///< ≥ 2
  std::string norm =
      "BatchNorm";    ///< "BatchNorm", "SyncBatchNorm" (over all ranks) or "none" (biases instead)
  uint64_t seed = 0;  ///< of the initial weights alone

  /// Throws UsageError naming the option, its value and what is expected. The module's constructor
  /// calls it.
  void validate() const;
};

class ResidualBlockImpl;

/// Stem (3 x 3 convolution, norm, ReLU), residual blocks, mean over the image, a linear layer.
class ImageClassifierImpl : public torch::nn::Module {
 public:
  /// Weights are drawn as He et al. (2015): normal, variance 2 / fan-in; norms 1 and 0, biases 0.
  /// They depend on `options.seed` alone: equal on every rank, and neither read nor touch the
  /// global random state. float32, CPU.
  ///
  /// Of "SyncBatchNorm", `group` is the data-parallel group, and all its ranks construct together:
  /// its layers get one sub-group of their own. UsageError without a group then; of the other norms
  /// a group is not looked at.
  explicit ImageClassifierImpl(const ImageClassifierOptions& options = {},
                               std::optional<ProcessGroup> group = std::nullopt);

  /// Images float [B, in_channels, H, W] to logits [B, classes]. With SyncBatchNorm in training
  /// mode collective. UsageError on another shape.
  at::Tensor forward(const at::Tensor& images);

  /// Mean cross entropy in nats; labels int64 [B]. A scalar to call backward on.
  at::Tensor loss(const at::Tensor& images, const at::Tensor& labels);

  const ImageClassifierOptions& options() const { return options_; }

 private:
  void initialize();

  ImageClassifierOptions options_;
  at::Tensor stem_;
  torch::nn::AnyModule stem_norm_;
  std::vector<std::shared_ptr<ResidualBlockImpl>> blocks_;
  at::Tensor head_weight_, head_bias_;
};
TORCH_MODULE(ImageClassifier);

}  // namespace tessera
