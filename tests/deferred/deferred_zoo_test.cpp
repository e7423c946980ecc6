#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "deferred/bits.h"
#include "harness/models.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/memory/deferred_init.h"

// Every way of making a parameter or a buffer gives the bits of eager construction.

namespace tessera::testing {
namespace {

using Make = std::function<at::Tensor(torch::nn::Module&)>;

at::Tensor sinusoid() {
  const auto positions = torch::arange(0, 512).unsqueeze(1) *
                         torch::exp(torch::arange(0, 256, 2) * (-std::log(10000.0) / 256));
  auto table = torch::zeros({512, 256});
  using torch::indexing::None, torch::indexing::Slice;
  table.index_put_({Slice(), Slice(0, None, 2)}, positions.sin());
  table.index_put_({Slice(), Slice(1, None, 2)}, positions.cos());
  return table.unsqueeze(0);
}

/// One module of many kinds of initialisation. `own`: seed of a generator of its own.
struct ZooImpl : torch::nn::Module {
  double seen = 0;

  void add(const std::string& name, at::Tensor value) {
    if (value.is_floating_point()) register_parameter(name, value.detach());
    else register_buffer(name, value);
  }

  ZooImpl() {
    layers();
    copies();
    initialisations();
    computed();
    values();
    register_parameter("last", torch::randn({7}));
  }

  void layers() {
    using namespace torch::nn;
    register_module("linear", Linear(700, 500));
    register_module("embedding", Embedding(EmbeddingOptions(3000, 100).padding_idx(7)));
    register_module("norm", LayerNorm(LayerNormOptions({40000})));
    register_module("conv", Conv2d(Conv2dOptions(64, 128, 3)));
    register_module("batch_norm", BatchNorm2d(BatchNorm2dOptions(40000)));
    register_module("lstm", LSTM(LSTMOptions(200, 300).num_layers(2)));
    register_module("half", Linear(600, 300))->to(at::kBFloat16);
  }

  void copies() {
    const torch::NoGradGuard no_grad;
    const auto weight = named_parameters()["linear.weight"];
    register_parameter("tied", weight);
    auto copy =
        register_module("copy", torch::nn::Linear(torch::nn::LinearOptions(100, 3000).bias(false)));
    copy->weight.copy_(named_parameters()["embedding.weight"]);
    add("transposed", weight.clone().t());
    add("early", weight.clone());
    torch::nn::init::xavier_normal_(weight);  // after "early" has taken the old values
    const auto chunks = torch::randn({400, 300}).chunk(2);
    add("cat", torch::cat({chunks[1], chunks[0]}));
    add("chunk", chunks[1]);
    add("stack", torch::stack({weight, weight}));
  }

  void initialisations() {
    const torch::NoGradGuard no_grad;
    auto normalised = torch::randn({300, 300});
    normalised.div_(normalised.norm());
    normalised.narrow(0, 3, 5).mul_(2).add_(1);
    normalised.index_put_({torch::tensor({1, 2}), torch::tensor({3, 4})},
                          torch::tensor({9.f, 8.f}));
    add("normalised", normalised);
    auto orthogonal = torch::empty({300, 200}), sparse = torch::empty({300, 200}),
         dirac = torch::empty({64, 64, 3, 3}), kaiming = torch::empty({300, 200});
    torch::nn::init::orthogonal_(orthogonal);
    torch::nn::init::sparse_(sparse, 0.1);
    torch::nn::init::dirac_(dirac);
    torch::nn::init::kaiming_uniform_(kaiming);
    add("orthogonal", orthogonal);
    add("sparse", sparse);
    add("dirac", dirac);
    add("kaiming", kaiming);
    add("eye", torch::eye(300));
    add("linspace", torch::linspace(0, 1, 90000));
    add("dropout", torch::dropout(torch::ones({200, 200}), 0.5, true));
    add("native_dropout", std::get<0>(at::native_dropout(torch::ones({200, 200}), 0.5, true)));
    add("permutation", torch::randperm(40000).to(at::kFloat));
    add("own_generator", torch::randn({200, 200}, at::detail::createCPUGenerator(5)));
    add("sinusoid", sinusoid());
    add("mask", torch::ones({300, 300}, at::kBool).tril());
  }

  /// Autocast, lazy conjugation and negation, and autograd are above the operators that compute.
  void computed() {
    const auto weight = named_parameters()["linear.weight"];  // requires a gradient
    add("with_gradient", at::linear(weight, weight).sigmoid());
    const auto complex = torch::view_as_complex(torch::randn({200, 200, 2}));
    add("conjugated", torch::view_as_real(complex.conj().mul(complex).add(complex.conj())));
    add("negated", torch::imag(complex.conj()).mul(2));
    add("imaginary", torch::imag(complex.conj()).clone());
    auto state = compat::AutocastState::current();
    state.cpu = {true, at::kBFloat16};
    const compat::AutocastState::Scope autocast(state);
    add("autocast", at::linear(weight, weight));
    add("autocast_product", at::mm(weight.t(), weight));
  }

  void values() {
    const torch::NoGradGuard no_grad;
    auto item = torch::rand({200, 200});
    seen = item.sum().item<double>() + item[3][4].item<double>();
    add("item", item.mul_(seen));
    auto written = torch::randn({200, 200});
    written.data_ptr<float>()[777] = 5;
    add("written", written.add_(1));
    auto read = torch::randn({200, 200});
    seen += read.data_ptr<float>()[5];
    add("read", read);
    auto unwritten = torch::empty({200, 200});
    std::fill_n(unwritten.data_ptr<float>(), 40000, 4.f);
    add("filled", unwritten);
    add("vector", torch::tensor(std::vector<float>(50000, 2.f)));
    std::vector<float> outside(50000, 3.f);
    add("outside", torch::from_blob(outside.data(), {50000}).clone());
  }
};
TORCH_MODULE(Zoo);

struct Built {
  std::map<std::string, uint64_t> tensors;
  double seen;
  uint64_t random_afterwards;
};

Built bits_of(Zoo zoo) {
  Built built{{}, zoo->seen, bits(torch::rand({3}))};
  for (const auto& item : zoo->named_parameters()) {
    materialize(item.value());
    built.tensors[item.key()] = bits(item.value());
  }
  for (const auto& item : zoo->named_buffers()) {
    materialize(item.value());
    built.tensors[item.key()] = bits(item.value());
  }
  return built;
}

TEST(DeferredZoo, HasTheBitsOfEagerConstructionAndLeavesTheSameRandomState) {
  torch::manual_seed(7);
  const auto eager = bits_of(Zoo());
  torch::manual_seed(7);
  const auto deferred = bits_of(deferred_init([] { return Zoo(); }));
  EXPECT_EQ(deferred.tensors, eager.tensors);
  EXPECT_EQ(deferred.seen, eager.seen);
  EXPECT_EQ(deferred.random_afterwards, eager.random_afterwards);
}

// Operators that consist of others are taken apart, so that nothing is computed at once.
TEST(DeferredZoo, CompositeOperatorsAreDeferred) {
  const auto before = deferred_stats().computed;
  const auto tensors = deferred_init([] {
    const torch::nn::Linear layer(300, 300);
    const auto weight = layer->weight;
    return std::vector<at::Tensor>{weight.t().contiguous(),
                                   weight.t().reshape({-1}),
                                   weight.to(at::kDouble),
                                   at::linear(weight, weight),
                                   at::matmul(weight, weight),
                                   at::einsum("ij,jk->ki", {weight, weight}),
                                   at::repeat_interleave(weight, 2, 0),
                                   at::silu_backward(weight, weight),
                                   at::stack({weight, weight}).flatten()};
  });
  for (size_t i = 0; i < tensors.size(); ++i) EXPECT_TRUE(is_deferred(tensors[i])) << i;
  EXPECT_EQ(deferred_stats().computed, before);
}

// Autocast and inference mode of the thread that computes the values do not change them.
TEST(DeferredZoo, DoesNotDependOnTheStateOfTheThreadThatMaterialises) {
  const auto make = [] {
    torch::manual_seed(3);
    const auto a = torch::randn({200, 200});
    return at::mm(a, a);
  };
  const auto eager = make();
  const auto deferred = deferred_init(make);
  ASSERT_TRUE(is_deferred(deferred));
  auto autocast = compat::AutocastState::current();
  autocast.cpu.enabled = true;
  const compat::AutocastState::Scope scope(autocast);
  const torch::InferenceMode inference;
  torch::manual_seed(99);
  const auto next = bits(torch::rand({3}));
  torch::manual_seed(99);
  materialize(deferred);
  EXPECT_EQ(bits(torch::rand({3})), next) << "a replay draws from a generator of its own";
  EXPECT_EQ(bits(deferred), bits(eager));
}

// What was computed from a tensor keeps the value that it had.
TEST(DeferredZoo, ATensorKeepsWhatItWasComputedFrom) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  auto [source, copy] = deferred_init([] {
    auto tensor = torch::randn({300, 300});
    return std::pair(tensor, tensor.clone());
  });
  torch::manual_seed(1);
  const auto expected = torch::randn({300, 300});
  materialize(source);
  source.zero_();
  EXPECT_EQ(bits(copy), bits(expected));
  source = at::Tensor();
  EXPECT_EQ(bits(copy), bits(expected));
}

}  // namespace
}  // namespace tessera::testing
