// The layers of torch::nn that have parameters and no buffers.

#include <torch/nn.h>

#include "fuzz/training/model/blocks.h"

namespace tessera::fuzz {
namespace {

namespace nn = torch::nn;

/// A block around one function and the modules that the function uses.
class LayerBlock : public Block {
 public:
  using Run = std::function<at::Tensor(const Flow&)>;
  explicit LayerBlock(int out) : Block(out) {}
  at::Tensor run(const Flow& flow) override { return run_(flow); }

  template <class Holder>
  Holder add(const std::string& name, Holder module) {
    return register_module(name, std::move(module));
  }
  void set(Run run) { run_ = std::move(run); }

 private:
  Run run_;
};

/// batch x length x channels to batch x channels x length and back.
at::Tensor turned(const at::Tensor& hidden) { return hidden.transpose(1, 2); }

}  // namespace

std::shared_ptr<Block> make_layer_block(const Item& which, int in) {
  const auto& kind = which.kind;
  const int out = which.number("out", in);
  auto block = std::make_shared<LayerBlock>(out);
  if (kind == "linear") {
    auto layer =
        block->add("layer", nn::Linear(nn::LinearOptions(in, out).bias(!which.flag("no_bias"))));
    block->set([=](const Flow& flow) mutable { return layer(flow.hidden); });
  } else if (kind == "conv1d") {
    auto layer = block->add("layer", nn::Conv1d(nn::Conv1dOptions(in, out, 3).padding(1)));
    block->set([=](const Flow& flow) mutable { return turned(layer(turned(flow.hidden))); });
  } else if (kind == "conv2d") {
    auto layer = block->add("layer", nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)));
    if (which.flag("channels_last"))
      layer->weight.set_data(layer->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    block->set([=](const Flow& flow) mutable {
      return turned(layer(turned(flow.hidden).unsqueeze(2)).squeeze(2));
    });
  } else if (kind == "conv_transpose1d") {
    auto layer =
        block->add("layer", nn::ConvTranspose1d(nn::ConvTranspose1dOptions(in, out, 3).padding(1)));
    block->set([=](const Flow& flow) mutable { return turned(layer(turned(flow.hidden))); });
  } else if (kind == "layer_norm") {
    block = std::make_shared<LayerBlock>(in);
    auto layer = block->add("layer", nn::LayerNorm(nn::LayerNormOptions({in})));
    block->set([=](const Flow& flow) mutable { return layer(flow.hidden); });
  } else if (kind == "group_norm") {
    block = std::make_shared<LayerBlock>(in);
    auto layer = block->add("layer", nn::GroupNorm(nn::GroupNormOptions(1, in)));
    block->set([=](const Flow& flow) mutable { return turned(layer(turned(flow.hidden))); });
  } else if (kind == "embedding") {
    block = std::make_shared<LayerBlock>(in);
    auto options = nn::EmbeddingOptions(kVocabulary, in);
    if (which.flag("padding")) options.padding_idx(0);
    if (which.flag("sparse")) options.sparse(true);
    auto layer = block->add("layer", nn::Embedding(options));
    block->set([=](const Flow& flow) mutable { return flow.hidden + layer(flow.tokens); });
  } else if (kind == "embedding_bag") {
    block = std::make_shared<LayerBlock>(in);
    auto layer = block->add(
        "layer", nn::EmbeddingBag(nn::EmbeddingBagOptions(kVocabulary, in).mode(torch::kSum)));
    block->set(
        [=](const Flow& flow) mutable { return flow.hidden + layer(flow.tokens).unsqueeze(1); });
  } else if (kind == "rnn" || kind == "gru") {
    const bool both = which.flag("bidirectional");
    block = std::make_shared<LayerBlock>(both ? 2 * out : out);
    if (kind == "rnn") {
      auto layer = block->add(
          "layer", nn::RNN(nn::RNNOptions(in, out).batch_first(true).bidirectional(both)));
      block->set([=](const Flow& flow) mutable { return std::get<0>(layer(flow.hidden)); });
    } else {
      auto layer = block->add(
          "layer", nn::GRU(nn::GRUOptions(in, out).batch_first(true).bidirectional(both)));
      block->set([=](const Flow& flow) mutable { return std::get<0>(layer(flow.hidden)); });
    }
  } else if (kind == "lstm") {
    auto layer = block->add(
        "layer",
        nn::LSTM(nn::LSTMOptions(in, out).batch_first(true).num_layers(which.number("layers", 1))));
    block->set([=](const Flow& flow) mutable { return std::get<0>(layer(flow.hidden)); });
  } else if (kind == "cell") {
    auto layer = block->add("layer", nn::GRUCell(nn::GRUCellOptions(in, out)));
    block->set([=](const Flow& flow) mutable {
      std::vector<at::Tensor> outputs;
      auto state =
          at::zeros({flow.hidden.size(0), layer->options.hidden_size()}, flow.hidden.options());
      for (int64_t t = 0; t < flow.hidden.size(1); ++t) {
        state = layer(flow.hidden.select(1, t), state);
        outputs.push_back(state);
      }
      return at::stack(outputs, 1);
    });
  } else if (kind == "attention") {
    block = std::make_shared<LayerBlock>(in);
    auto layer = block->add("layer", nn::MultiheadAttention(nn::MultiheadAttentionOptions(in, 1)));
    block->set([=](const Flow& flow) mutable {
      const auto x = flow.hidden.transpose(0, 1);
      return std::get<0>(layer(x, x, x)).transpose(0, 1);
    });
  } else if (kind == "encoder") {
    block = std::make_shared<LayerBlock>(in);
    auto layer = block->add(
        "layer", nn::TransformerEncoderLayer(
                     nn::TransformerEncoderLayerOptions(in, 1).dim_feedforward(7).dropout(0)));
    block->set([=](const Flow& flow) mutable {
      return layer(flow.hidden.transpose(0, 1)).transpose(0, 1);
    });
  } else if (kind == "prelu") {
    block = std::make_shared<LayerBlock>(in);
    auto layer = block->add("layer", nn::PReLU());
    block->set([=](const Flow& flow) mutable { return layer(flow.hidden); });
  } else if (kind == "bilinear") {
    auto layer = block->add("layer", nn::Bilinear(nn::BilinearOptions(in, in, out)));
    block->set([=](const Flow& flow) mutable { return layer(flow.hidden, flow.hidden); });
  } else if (kind == "sequential") {
    auto layer = block->add(
        "layer", nn::Sequential(nn::Linear(in, 6), nn::ReLU(),
                                nn::LayerNorm(nn::LayerNormOptions({6})), nn::Linear(6, out)));
    block->set([=](const Flow& flow) mutable { return layer->forward(flow.hidden); });
  } else if (kind == "module_list") {
    nn::ModuleList list;
    for (int i = 0; i < 2; ++i) list->push_back(nn::Linear(in, out));
    block->add("layers", list);
    block->set([=](const Flow& flow) mutable {
      auto sum = at::zeros({1}, flow.hidden.options());
      for (const auto& each : *list) sum = sum + each->as<nn::Linear>()->forward(flow.hidden);
      return sum;
    });
  } else if (kind == "module_dict") {
    nn::ModuleDict dict;
    block->add("layers", dict);
    dict->update({{"b", nn::Linear(in, out).ptr()}, {"a", nn::Linear(in, out).ptr()}});
    block->set([=](const Flow& flow) mutable {
      return dict["a"]->as<nn::Linear>()->forward(flow.hidden) *
             torch::sigmoid(dict["b"]->as<nn::Linear>()->forward(flow.hidden));
    });
  } else {
    return nullptr;
  }
  return block;
}

}  // namespace tessera::fuzz
