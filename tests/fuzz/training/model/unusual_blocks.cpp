// Parameters that are unusual in shape, dtype, strides or use.

#include <torch/nn/modules/linear.h>

#include "fuzz/training/model/blocks.h"
#include "tessera/activation_checkpoint.h"

namespace tessera::fuzz {
namespace {

namespace nn = torch::nn;

/// A block whose parameters belong to itself.
class OwnBlock : public Block {
 public:
  using Run = std::function<at::Tensor(OwnBlock&, const Flow&)>;
  OwnBlock(int out, std::vector<std::pair<std::string, at::Tensor>> parameters, Run run)
      : Block(out), run_(std::move(run)) {
    for (auto& [name, value] : parameters) own.push_back(register_parameter(name, value));
  }
  at::Tensor run(const Flow& flow) override { return run_(*this, flow); }

  std::vector<at::Tensor> own;

 private:
  Run run_;
};

at::Tensor matrix(int rows, int columns) { return torch::randn({rows, columns}) * 0.5; }

/// Computes in another dtype than the rest of the model.
class DtypeBlock : public Block {
 public:
  DtypeBlock(int in, int out, at::ScalarType dtype)
      : Block(out), layer_(register_module("layer", nn::Linear(in, out))), dtype_(dtype) {}
  at::Tensor run(const Flow& flow) override {
    return layer_(flow.hidden.to(dtype_)).to(flow.hidden.scalar_type());
  }

 private:
  nn::Linear layer_;
  at::ScalarType dtype_;
};

/// The second layer's member is the first one's weight, as `decoder->weight = embedding->weight`
/// makes it. The second layer's registered weight stays, unused.
class TiedBlock : public Block {
 public:
  explicit TiedBlock(int in)
      : Block(in),
        first_(register_module("first", nn::Linear(in, in))),
        second_(register_module("second", nn::Linear(in, in))) {
    second_->weight = first_->weight;
  }
  at::Tensor run(const Flow& flow) override { return second_(torch::relu(first_(flow.hidden))); }

 private:
  nn::Linear first_, second_;
};

/// One module under two names, used twice.
class SharedBlock : public Block {
 public:
  explicit SharedBlock(int in) : Block(in), layer_(register_module("layer", nn::Linear(in, in))) {
    register_module("again", layer_);
  }
  at::Tensor run(const Flow& flow) override { return layer_(torch::tanh(layer_(flow.hidden))); }

 private:
  nn::Linear layer_;
};

/// Has one layer that it uses and one that it uses never, or only if the step says so.
class BranchBlock : public Block {
 public:
  BranchBlock(int in, bool ever)
      : Block(in),
        used_(register_module("used", nn::Linear(in, in))),
        other_(register_module("other", nn::Linear(in, in))),
        ever_(ever) {}
  at::Tensor run(const Flow& flow) override {
    const auto result = used_(flow.hidden);
    return ever_ && flow.branch ? result + other_(flow.hidden) : result;
  }

 private:
  nn::Linear used_, other_;
  bool ever_;
};

/// Has three layers, of which a step uses one.
class ExpertsBlock : public Block {
 public:
  explicit ExpertsBlock(int in) : Block(in) {
    for (int e = 0; e < 3; ++e)
      experts_.push_back(register_module("expert" + std::to_string(e), nn::Linear(in, in)));
  }
  at::Tensor run(const Flow& flow) override {
    return experts_[static_cast<size_t>(flow.expert) % experts_.size()](flow.hidden);
  }

 private:
  std::vector<nn::Linear> experts_;
};

/// y = x * scale, with a backward of its own.
struct ScaleFunction : torch::autograd::Function<ScaleFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x,
                            at::Tensor scale) {
    context->save_for_backward({x, scale});
    return x * scale;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(at::IntArrayRef({0, 1}))};
  }
};

/// A layer that backward runs again.
class CheckpointBlock : public Block {
 public:
  CheckpointBlock(int in, int out)
      : Block(out),
        first_(register_module("first", nn::Linear(in, 5))),
        second_(register_module("second", nn::Linear(5, out))) {}
  at::Tensor run(const Flow& flow) override {
    return checkpoint([this](at::Tensor x) { return second_(torch::tanh(first_(x))); },
                      flow.hidden);
  }

 private:
  nn::Linear first_, second_;
};

}  // namespace

std::shared_ptr<Block> make_unusual_block(const Item& which, int in) {
  const auto& kind = which.kind;
  const int out = which.number("out", in);
  const auto own = [&](int channels, std::vector<std::pair<std::string, at::Tensor>> parameters,
                       OwnBlock::Run run) {
    return std::make_shared<OwnBlock>(channels, std::move(parameters), std::move(run));
  };
  if (kind == "scalar")
    return own(in, {{"scale", torch::rand({}) + 0.5}},
               [](OwnBlock& b, const Flow& f) { return f.hidden * b.own[0]; });
  if (kind == "empty")
    return own(in, {{"nothing", torch::zeros({0, 3})}, {"shift", torch::randn({1})}},
               [](OwnBlock& b, const Flow& f) {
                 return f.hidden + b.own[0].sum().to(f.hidden.scalar_type()) + b.own[1];
               });
  if (kind == "strided")
    return own(out, {{"weight", matrix(out, in).t()}},
               [](OwnBlock& b, const Flow& f) { return f.hidden.matmul(b.own[0]); });
  if (kind == "views")
    return own(out, {{"weight", matrix(2 * out, in)}, {"bias", torch::randn({2 * out})}},
               [](OwnBlock& b, const Flow& f) {
                 const auto halves = b.own[0].chunk(2, 0);
                 const auto shift = b.own[1].view({2, -1});
                 return torch::linear(f.hidden, halves[0], shift[0]) *
                        torch::sigmoid(torch::linear(f.hidden, halves[1], shift[1]));
               });
  if (kind == "functional")
    return own(out, {{"weight", matrix(out, in)}}, [](OwnBlock& b, const Flow& f) {
      return torch::linear(f.hidden, b.own[0] / b.own[0].norm());
    });
  if (kind == "custom")
    return own(in, {{"scale", torch::rand({in}) + 0.5}},
               [](OwnBlock& b, const Flow& f) { return ScaleFunction::apply(f.hidden, b.own[0]); });
  if (kind == "complex")
    return own(out, {{"weight", torch::complex(matrix(out, in), matrix(out, in))}},
               [](OwnBlock& b, const Flow& f) {
                 const auto x = torch::complex(f.hidden, 0.5 * f.hidden);
                 return torch::real(x.matmul(b.own[0].t()));
               });
  if (kind == "double_layer") return std::make_shared<DtypeBlock>(in, out, at::kDouble);
  if (kind == "bfloat16_layer") return std::make_shared<DtypeBlock>(in, out, at::kBFloat16);
  if (kind == "half_layer")  // libtorch 1.13 has no matrix products in float16 on the CPU
    return own(out, {{"weight", matrix(out, in)}, {"bias", torch::randn({out})}},
               [](OwnBlock& b, const Flow& f) {
                 const auto dtype = f.hidden.scalar_type();
                 return torch::linear(f.hidden, b.own[0].to(dtype), b.own[1].to(dtype));
               });
  if (kind == "tied") return std::make_shared<TiedBlock>(in);
  if (kind == "shared") return std::make_shared<SharedBlock>(in);
  if (kind == "unused") return std::make_shared<BranchBlock>(in, false);
  if (kind == "conditional") return std::make_shared<BranchBlock>(in, true);
  if (kind == "experts") return std::make_shared<ExpertsBlock>(in);
  if (kind == "checkpoint") return std::make_shared<CheckpointBlock>(in, out);
  return nullptr;
}

}  // namespace tessera::fuzz
