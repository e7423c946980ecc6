#include "fuzz/training/model/net.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/linear.h>

#include "fuzz/training/model/random.h"

namespace tessera::fuzz {
namespace {

constexpr int kBatch = 3, kLength = 3, kChannels = 4, kOutputs = 2;
constexpr auto kPause = std::chrono::milliseconds(2);

/// Passes a tensor on, and throws in backward.
struct ThrowInBackward : torch::autograd::Function<ThrowInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list) {
    throw Sprung();
  }
};

/// `tensor`, whose backward throws if `trap` says so.
at::Tensor with_trap(const at::Tensor& tensor, Trap trap) {
  if (trap == Trap::forward) throw Sprung();
  if (trap == Trap::backward) return ThrowInBackward::apply(tensor);
  if (trap == Trap::hook && tensor.requires_grad())
    tensor.register_hook([](const at::Tensor& gradient) -> at::Tensor {
      throw Sprung();
      return gradient;
    });
  return tensor;
}

/// Other ranks get ahead meanwhile: now, and in the backward of `tensor`.
void wait_at(const at::Tensor& tensor) {
  std::this_thread::sleep_for(kPause);
  if (!tensor.requires_grad()) return;
  tensor.register_hook([](const at::Tensor& gradient) {
    std::this_thread::sleep_for(kPause);
    return gradient;
  });
}

}  // namespace

at::ScalarType dtype_of(const Case& which) {
  return which.dtype == "double" ? at::kDouble : at::kFloat;
}

Batch make_batch(uint64_t seed, int step, int micro, int rank, at::ScalarType dtype) {
  Random mix(seed ^ (static_cast<uint64_t>(step) << 40) ^ (static_cast<uint64_t>(micro) << 20) ^
             static_cast<uint64_t>(rank));
  auto generator = at::make_generator<at::CPUGeneratorImpl>(mix.next());
  Batch batch;
  batch.x = at::randn({kBatch, kLength, kChannels}, generator, at::kFloat).to(dtype);
  batch.tokens = at::randint(kVocabulary, {kBatch, kLength}, generator, at::kLong);
  batch.y = at::randn({kBatch, kOutputs}, generator, at::kFloat).to(dtype);
  return batch;
}

std::shared_ptr<Net> Net::make(const Case& which, uint64_t seed) {
  static std::mutex mutex;  // torch's default generator is the process's
  std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return std::shared_ptr<Net>(new Net(which));
}

Net::Net(const Case& which) {
  int channels = kChannels;
  for (size_t i = 0; i < which.layers.size(); ++i) {
    names_.push_back("b" + std::to_string(i) + "_" + which.layers[i].kind);
    blocks_.push_back(register_module(names_.back(), make_block(which.layers[i], channels)));
    channels = blocks_.back()->out();
  }
  names_.push_back("last");
  last_ = register_module("last", torch::nn::Linear(channels, kOutputs));
  if (dtype_of(which) != at::kFloat) to(dtype_of(which));
  for (size_t i = 0; i < which.layers.size(); ++i) {
    if (which.layers[i].kind == "bfloat16_layer") blocks_[i]->to(at::kBFloat16);
    if (which.layers[i].kind == "half_layer") blocks_[i]->to(at::kHalf);
    if (which.layers[i].kind == "double_layer") blocks_[i]->to(at::kDouble);
    if (which.layers[i].flag("frozen"))
      for (auto& parameter : blocks_[i]->parameters()) parameter.requires_grad_(false);
  }
}

at::Tensor Net::forward(const Batch& batch) {
  // As the data pipeline of a model that is converted later would do.
  Flow flow{batch.x.to(last_->weight.scalar_type()), batch.tokens, batch.branch, batch.expert};
  auto pending = trap;
  const auto middle = blocks_.size() / 2;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (i == middle && pending == Trap::forward) throw Sprung();
    flow.hidden = torch::tanh(blocks_[i]->run(flow));
    if (i == middle && slow) wait_at(flow.hidden);
    if (i == middle && flow.hidden.requires_grad())
      flow.hidden = with_trap(flow.hidden, std::exchange(pending, Trap::nowhere));
  }
  return with_trap(last_(flow.hidden.mean(1)), pending);
}

at::Tensor Net::loss(const at::Tensor& output, const Batch& batch) const {
  return (output - batch.y.to(output.scalar_type())).square().mean();
}

torch::nn::Module& Net::part(int i) {
  const auto which = static_cast<size_t>(i) % (blocks_.size() + 1);
  return which < blocks_.size() ? static_cast<torch::nn::Module&>(*blocks_[which]) : *last_;
}

const std::string& Net::part_name(int i) const {
  return names_[static_cast<size_t>(i) % names_.size()];
}

}  // namespace tessera::fuzz
