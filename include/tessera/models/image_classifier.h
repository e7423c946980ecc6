#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "tessera/process_group.h"

// A small residual network for images (He et al., 2016, in the form used for CIFAR) as a plain
// module.

#pragma GCC visibility push(default)
namespace tessera {

class OptionReader;

struct ImageClassifierOptions {
  int64_t in_channels = 1;
  /// Channels of the first block. Each further block doubles the channels and halves the image.
  int64_t channels = 16;
  int64_t blocks = 2;    ///< Residual blocks of two 3 x 3 convolutions, 1 to 8.
  int64_t classes = 10;  ///< ≥ 2
  /// "BatchNorm", "SyncBatchNorm" (over all ranks) or "none" (a bias for each channel instead).
  std::string norm = "BatchNorm";
  uint64_t seed = 0;  ///< Seed of the initial weights only.

  void read(OptionReader& options);  ///< All but the seed; see option_reader.h.
  /// Throws UsageError naming the option, its value and the expected values. The module's
  /// constructor calls it.
  void validate() const;
};

class [[gnu::visibility("hidden")]] ResidualBlockImpl;

/// A stem (3 x 3 convolution, norm, ReLU), residual blocks, the mean over the image, a linear
/// layer.
class ImageClassifierImpl : public torch::nn::Module {
 public:
  /// Initialises the weights as He et al. (2015) do: normally distributed with variance 2 / fan-in;
  /// norms have weight 1 and bias 0, biases are 0. The weights depend on `options.seed` only, so
  /// they are equal on every rank. The global random state is neither read nor changed. float32, on
  /// the CPU.
  ///
  /// With norm "SyncBatchNorm", `group` is the data-parallel group and construction is collective
  /// over it: the layers share one sub-group of it. Throws UsageError if the group is missing. With
  /// other norms the group is ignored and construction is local.
  explicit ImageClassifierImpl(const ImageClassifierOptions& options = {},
                               std::optional<ProcessGroup> group = std::nullopt);

  /// `images` is floating-point [B, in_channels, H, W]. Returns logits [B, classes]. Collective
  /// with SyncBatchNorm in training mode. Throws UsageError for another shape.
  at::Tensor forward(const at::Tensor& images);

  /// Mean cross entropy in nats, as a scalar. `labels` is int64 [B].
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
#pragma GCC visibility pop
