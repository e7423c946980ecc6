#pragma once

#include <tuple>
#include <vector>

#include <torch/nn.h>
#include <torch/types.h>

#include "tessera/fully_sharded_data_parallel.h"

// Models in typical styles, without any code for sharding.

namespace tessera::testing {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

inline FullyShardedDataParallelOptions every_leaf() {
  FullyShardedDataParallelOptions options;
  options.wrap_policy = wrap_leaves();
  return options;
}

struct ResidualImpl : nn::Module {
  explicit ResidualImpl(int64_t channels) {
    first = register_module(
        "first", nn::Conv2d(nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)));
    norm1 = register_module("norm1", nn::BatchNorm2d(channels));
    second = register_module(
        "second", nn::Conv2d(nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false)));
    norm2 = register_module("norm2", nn::BatchNorm2d(channels));
  }
  torch::Tensor forward(torch::Tensor x) {
    return torch::relu(norm2(second(torch::relu(norm1(first(x))))) + x);
  }
  nn::Conv2d first{nullptr}, second{nullptr};
  nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
};
TORCH_MODULE(Residual);

struct ResNetImpl : nn::Module {
  ResNetImpl() {
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(3, 5, 3).padding(1)));
    layers = register_module("layers", nn::Sequential(Residual(5), Residual(5)));
    up = register_module("up", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(5, 4, 2).stride(2)));
    slope = register_module("slope", nn::PReLU());
    grouped = register_module("grouped", nn::Conv2d(nn::Conv2dOptions(4, 8, 3).groups(2)));
    head = register_module("head", nn::Linear(8, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    return head(grouped(slope(up(layers->forward(torch::relu(stem(x)))))).mean({2, 3}));
  }
  nn::Conv2d stem{nullptr}, grouped{nullptr};
  nn::Sequential layers{nullptr};
  nn::ConvTranspose2d up{nullptr};
  nn::PReLU slope{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(ResNet);

/// A two-layer LSTM, a GRU, and an output layer tied to the embedding.
struct RecurrentImpl : nn::Module {
  RecurrentImpl() {
    embedding = register_module("embedding", nn::Embedding(11, 6));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(6, 5).num_layers(2).batch_first(true)));
    gru = register_module("gru", nn::GRU(nn::GRUOptions(5, 6).batch_first(true)));
  }
  torch::Tensor forward(torch::Tensor tokens) {
    auto x = std::get<0>(lstm(embedding(tokens)));
    return F::linear(std::get<0>(gru(x)), embedding->weight);
  }
  nn::Embedding embedding{nullptr};
  nn::LSTM lstm{nullptr};
  nn::GRU gru{nullptr};
};
TORCH_MODULE(Recurrent);

struct TranslatorImpl : nn::Module {
  TranslatorImpl() {
    transformer = register_module(
        "transformer",
        nn::Transformer(nn::TransformerOptions(8, 2, 2, 2).dim_feedforward(13).dropout(0)));
    head = register_module("head", nn::Linear(8, 3));
  }
  torch::Tensor forward(torch::Tensor source, torch::Tensor target) {
    return head(transformer(source.transpose(0, 1), target.transpose(0, 1))).transpose(0, 1);
  }
  nn::Transformer transformer{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Translator);

/// Uses one block three times, has a parameter of its own, passes weights to functions, and uses
/// several units in one operator.
struct TwiceImpl : nn::Module {
  TwiceImpl() {
    block = register_module("block", nn::Linear(3, 3));
    other = register_module("other", nn::Linear(3, 7));
    last = register_module("last", nn::Linear(7, 2));
    gain = register_parameter("gain", torch::full({1}, 1.5));
    mix = register_parameter("mix", torch::eye(3) * 0.5);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = block(torch::tanh(block(x)));
    x = torch::einsum("bi,ij->bj", {x, mix}) * gain;
    x = torch::tanh(block(x));
    auto joined = torch::cat({block->bias, other->bias, last->bias});
    return last(torch::tanh(F::linear(x, other->weight, other->bias))) + joined.square().sum();
  }
  nn::Linear block{nullptr}, other{nullptr}, last{nullptr};
  torch::Tensor gain, mix;
};
TORCH_MODULE(Twice);

/// Skips a block on odd steps.
struct SkippingImpl : nn::Module {
  SkippingImpl() {
    first = register_module("first", nn::Linear(3, 5));
    optional = register_module("optional", nn::Linear(5, 5));
    last = register_module("last", nn::Linear(5, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::tanh(first(x));
    if (step++ % 2 == 0) x = torch::tanh(optional(x));
    return last(x);
  }
  nn::Linear first{nullptr}, optional{nullptr}, last{nullptr};
  int step = 0;
};
TORCH_MODULE(Skipping);

struct ContainersImpl : nn::Module {
  ContainersImpl() {
    list = register_module("list", nn::ModuleList(nn::Linear(3, 4), nn::Linear(4, 4)));
    torch::OrderedDict<std::string, std::shared_ptr<nn::Module>> items;
    items.insert("a", std::make_shared<nn::LinearImpl>(4, 5));
    items.insert("norm", std::make_shared<nn::LayerNormImpl>(nn::LayerNormOptions({5})));
    dict = register_module("dict", nn::ModuleDict(items));
    any = nn::AnyModule(nn::Linear(5, 5));
    register_module("any", any.ptr());
    sequence =
        register_module("sequence", nn::Sequential(nn::Linear(5, 3), nn::Tanh(), nn::Linear(3, 2)));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& module : *list) x = torch::tanh(module->as<nn::Linear>()->forward(x));
    x = dict["norm"]->as<nn::LayerNorm>()->forward(dict["a"]->as<nn::Linear>()->forward(x));
    return sequence->forward(any.forward(x));
  }
  nn::ModuleList list{nullptr};
  nn::ModuleDict dict{nullptr};
  nn::AnyModule any;
  nn::Sequential sequence{nullptr};
};
TORCH_MODULE(Containers);

/// Several inputs and a tuple as output.
struct TupleImpl : nn::Module {
  TupleImpl() {
    left = register_module("left", nn::Linear(3, 4));
    right = register_module("right", nn::Bilinear(3, 4, 2));
  }
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor a, const torch::Tensor& b,
                                                   double scale) {
    auto h = torch::tanh(left(a)) * scale;
    return {right(b, h), h};
  }
  nn::Linear left{nullptr};
  nn::Bilinear right{nullptr};
};
TORCH_MODULE(Tuple);

}  // namespace tessera::testing
