#include "tessera/models/image_classifier.h"

#include <cmath>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>

#include "models/residual_block.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"
#include "tessera/step/sync_batch_norm.h"

namespace tessera {
namespace {

constexpr int64_t kMostChannels = 65536;

/// Replaces a norm: adds a bias to each channel.
class ChannelBias : public torch::nn::Module {
 public:
  explicit ChannelBias(int64_t channels) {
    bias_ = register_parameter("bias", at::zeros({channels}));
  }
  at::Tensor forward(const at::Tensor& x) { return x + bias_.view({-1, 1, 1}); }

 private:
  at::Tensor bias_;
};

/// Returns the function that adds the layer for option `norm`. Collective for "SyncBatchNorm".
AddNorm norm_maker(const std::string& norm, std::optional<ProcessGroup> group) {
  const auto add = [](torch::nn::Module& parent, const std::string& name, auto layer) {
    return torch::nn::AnyModule(parent.register_module(name, layer));
  };
  if (norm == "none") {
    return [add](torch::nn::Module& parent, const std::string& name, int64_t channels) {
      return add(parent, name, std::make_shared<ChannelBias>(channels));
    };
  }
  if (norm == "BatchNorm") {
    return [add](torch::nn::Module& parent, const std::string& name, int64_t channels) {
      return add(parent, name, torch::nn::BatchNorm2d(channels));
    };
  }
  if (!group) {
    throw UsageError(
        "ImageClassifier: norm is SyncBatchNorm, which needs the process group; none was given");
  }
  // With a group of their own, the layers' collectives do not mix with DistributedDataParallel's
  // during backward.
  return [add, own = group->split(0).value()](torch::nn::Module& parent, const std::string& name,
                                              int64_t channels) {
    return add(parent, name, SyncBatchNorm(torch::nn::BatchNormOptions(channels), own));
  };
}

}  // namespace

void ImageClassifierOptions::read(OptionReader& options) {
  const Range channels_of{1, kMostChannels};
  options.read("in_channels", in_channels, "channels of the images", channels_of);
  options.read("channels", channels, "channels of the first stage", channels_of);
  options.read("blocks", blocks, "residual blocks", Range{1, 8});
  options.read("classes", classes, "number of classes", Range{2, 2147483648.0});
  options.read_choice("norm", norm, {"BatchNorm", "SyncBatchNorm", "none"},
                      "normalisation; SyncBatchNorm: over the batch of all ranks");
}

void ImageClassifierOptions::validate() const {
  check_options("ImageClassifier", *this);
  if (channels << (blocks - 1) > kMostChannels) {
    throw UsageError("ImageClassifier: channels is " + std::to_string(channels) + ", which " +
                     std::to_string(blocks) + " blocks make " +
                     std::to_string(channels << (blocks - 1)) + "; expected at most " +
                     std::to_string(kMostChannels));
  }
}

ImageClassifierImpl::ImageClassifierImpl(const ImageClassifierOptions& options,
                                         std::optional<ProcessGroup> group)
    : options_(options) {
  options_.validate();
  const AddNorm add_norm = norm_maker(options_.norm, std::move(group));
  stem_ = add_convolution(*this, "stem", options_.in_channels, options_.channels, 3);
  stem_norm_ = add_norm(*this, "stem_norm", options_.channels);
  const auto list = register_module("blocks", torch::nn::ModuleList());
  int64_t channels = options_.channels;
  for (int64_t i = 0; i < options_.blocks; ++i) {
    const int64_t to = i == 0 ? channels : 2 * channels;
    blocks_.push_back(std::make_shared<ResidualBlockImpl>(channels, to, i == 0 ? 1 : 2, add_norm));
    list->push_back(blocks_.back());
    channels = to;
  }
  const auto head = register_module("head", std::make_shared<torch::nn::Module>("Head"));
  head_weight_ = head->register_parameter("weight", at::empty({options_.classes, channels}));
  head_bias_ = head->register_parameter("bias", at::zeros({options_.classes}));
  initialize();
}

void ImageClassifierImpl::initialize() {
  const torch::NoGradGuard no_grad;
  // One generator and a fixed order of the parameters give the same numbers on every rank. Norms
  // and biases have their values already.
  at::Generator generator = at::detail::createCPUGenerator(options_.seed);
  for (auto& parameter : parameters()) {
    if (parameter.dim() > 1) {
      const int64_t fan_in = parameter.numel() / parameter.size(0);
      parameter.normal_(0.0, std::sqrt(2.0 / static_cast<double>(fan_in)), generator);
    }
  }
}

at::Tensor ImageClassifierImpl::forward(const at::Tensor& images) {
  if (images.dim() != 4 || images.size(1) != options_.in_channels || !images.is_floating_point()) {
    std::string shape;
    for (const int64_t size : images.sizes())
      shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    throw UsageError("ImageClassifier: images must be floating-point [batch, " +
                     std::to_string(options_.in_channels) + ", height, width] (in_channels is " +
                     std::to_string(options_.in_channels) + "), given " +
                     std::string(c10::toString(images.scalar_type())) + " [" + shape + "]");
  }
  at::Tensor x = at::relu(stem_norm_.forward(at::conv2d(images, stem_, {}, 1, 1)));
  for (const auto& block : blocks_) x = block->forward(x);
  return at::linear(x.mean({2, 3}), head_weight_, head_bias_);
}

at::Tensor ImageClassifierImpl::loss(const at::Tensor& images, const at::Tensor& labels) {
  if (labels.dim() != 1 || labels.scalar_type() != at::kLong || images.dim() < 1 ||
      labels.size(0) != images.size(0))
    throw UsageError("ImageClassifier: labels must be int64 [batch], one for each image");
  return at::cross_entropy_loss(forward(images), labels);
}

}  // namespace tessera
