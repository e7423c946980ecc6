#include "tessera/step/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The number of samples on each rank, for each world size.
std::vector<std::vector<int64_t>> uneven_batches() {
  return {{6}, {3, 5}, {1, 4, 2}, {5, 0, 1, 3}};
}

at::Tensor whole_batch(int64_t count, int step, const std::vector<int64_t>& rest,
                       at::ScalarType dtype) {
  std::vector<int64_t> sizes{count};
  sizes.insert(sizes.end(), rest.begin(), rest.end());
  // The mean is far from zero, where a variance computed from a sum of squares would be inaccurate.
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(7 + step),
                   at::TensorOptions().dtype(dtype)) *
             0.5 +
         30;
}

at::Tensor weights_of(const at::Tensor& y) {
  return at::arange(y.numel(), y.options()).remainder(7).view(y.sizes()) - 3;
}

/// libtorch's optional double, a type whose name differs between versions.
using Momentum =
    std::decay_t<decltype(std::declval<const torch::nn::BatchNormOptions&>().momentum())>;

struct Shape {
  std::string name;
  std::vector<int64_t> rest;
  at::ScalarType dtype;
  double tolerance;
};

class SyncBatchNormParity : public ::testing::TestWithParam<Shape> {};

TEST_P(SyncBatchNormParity, ForwardAndBackwardEqualOneProcessOnTheWholeBatch) {
  const auto& tested = GetParam();
  const auto close = [&](const at::Tensor& a, const at::Tensor& b) {
    return at::allclose(a, b, tested.tolerance, tested.tolerance * 10);
  };
  for (const auto& batches : uneven_batches()) {
    const int64_t total = std::accumulate(batches.begin(), batches.end(), int64_t{0});
    for (const Momentum& momentum : {Momentum(0.3), Momentum()}) {
      auto options = torch::nn::BatchNormOptions(4).momentum(momentum);
      torch::nn::BatchNorm2d plain(options);
      plain->to(tested.dtype);
      std::vector<at::Tensor> inputs, outputs, input_gradients, weight_gradients, bias_gradients;
      for (int step = 0; step < 3; ++step) {
        auto x = whole_batch(total, step, tested.rest, tested.dtype).requires_grad_();
        at::Tensor x4 = x;
        while (x4.dim() < 4) x4 = x4.unsqueeze(-1);
        auto y = plain(x4).view(x.sizes());
        plain->zero_grad();
        (y * weights_of(y)).sum().backward();
        outputs.push_back(y.detach());
        input_gradients.push_back(x.grad());
        weight_gradients.push_back(plain->weight.grad().clone());
        bias_gradients.push_back(plain->bias.grad().clone());
      }
      run_ranks(static_cast<int>(batches.size()), [&](ProcessGroup group, int rank) {
        SyncBatchNorm norm(options, group);
        norm->to(tested.dtype);
        const int64_t begin = std::accumulate(batches.begin(), batches.begin() + rank, int64_t{0}),
                      count = batches[rank];
        for (int step = 0; step < 3; ++step) {
          auto x = whole_batch(total, step, tested.rest, tested.dtype)
                       .narrow(0, begin, count)
                       .clone()
                       .requires_grad_();
          auto y = norm(x);
          EXPECT_TRUE(close(y, outputs[step].narrow(0, begin, count)));
          norm->zero_grad();
          group.reset_stats();
          (y * weights_of(outputs[step]).narrow(0, begin, count)).sum().backward();
          EXPECT_EQ(group.stats().calls(), 1u);
          EXPECT_TRUE(close(x.grad(), input_gradients[step].narrow(0, begin, count)));
          group.all_reduce(norm->weight.grad());
          group.all_reduce(norm->bias.grad());
          EXPECT_TRUE(close(norm->weight.grad(), weight_gradients[step]));
          EXPECT_TRUE(close(norm->bias.grad(), bias_gradients[step]));
        }
        EXPECT_TRUE(close(norm->running_mean, plain->running_mean));
        EXPECT_TRUE(close(norm->running_var, plain->running_var));
        EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 3);
        norm->eval();
        group.reset_stats();
        torch::nn::BatchNorm2d still(options);
        still->to(tested.dtype);
        still->running_mean.copy_(plain->running_mean);
        still->running_var.copy_(plain->running_var);
        still->eval();
        auto x = whole_batch(total, 9, tested.rest, tested.dtype);
        at::Tensor x4 = x;
        while (x4.dim() < 4) x4 = x4.unsqueeze(-1);
        EXPECT_TRUE(close(norm(x), still(x4).view(x.sizes())));
        EXPECT_EQ(group.stats().calls(), 0u) << "eval mode must be local";
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SyncBatchNormParity,
                         ::testing::Values(Shape{"vectors", {4}, at::kDouble, 1e-9},
                                           Shape{"lines", {4, 5}, at::kFloat, 2e-4},
                                           Shape{"images", {4, 3, 2}, at::kDouble, 1e-9}),
                         [](const auto& tested) { return tested.param.name; });

struct TwoPartsImpl : torch::nn::Module {
  TwoPartsImpl() {
    using namespace torch::nn;
    body = register_module("body", Sequential(Linear(3, 6), BatchNorm1d(6), Tanh()));
    head = register_module("head", Sequential(Linear(6, 4), BatchNorm1d(4)));
  }
  torch::Tensor forward(torch::Tensor x) { return head->forward(body->forward(x)); }
  torch::nn::Sequential body{nullptr}, head{nullptr};
};
TORCH_MODULE(TwoParts);

TEST(SyncBatchNorm, AModelWithDataParallelEqualsOneProcess) {
  const auto make = [](bool synced, ProcessGroup group) {
    auto net = seeded<TwoParts>(5);
    if (synced) EXPECT_THAT(convert_sync_batch_norm(*net, group), ElementsAre("body.1", "head.1"));
    return net;
  };
  const auto data = at::randn({12, 3}, at::make_generator<at::CPUGeneratorImpl>(3));
  const auto loss_of = [](const at::Tensor& y) { return (y - 0.5).pow(3).abs().mean(); };
  auto plain = make(false, ProcessGroup());
  torch::optim::SGD reference(plain->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    reference.zero_grad();
    loss_of(plain->forward(data + step)).backward();
    reference.step();
  }
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = make(true, group);
      ASSERT_EQ(net->named_parameters().keys(), plain->named_parameters().keys());
      ASSERT_EQ(net->named_buffers().keys(), plain->named_buffers().keys());
      DistributedDataParallel ddp(net, group, {.bucket_cap_mb = 1e-4});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < 4; ++step) {
        optimizer.zero_grad();
        loss_of(ddp((data + step).narrow(0, 12 / world * rank, 12 / world))).backward();
        optimizer.step();
      }
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-4, 1e-5))
            << world;
      for (size_t i = 0; i < net->buffers().size(); ++i)
        EXPECT_TRUE(at::allclose(net->buffers()[i].to(at::kFloat),
                                 plain->buffers()[i].to(at::kFloat), 1e-4, 1e-5));
    });
  }
}

TEST(SyncBatchNorm, ConversionKeepsTheTensorsAndRefusesLayersThatItCannotReplace) {
  torch::nn::Sequential net(torch::nn::Conv2d(2, 3, 1),
                            torch::nn::BatchNorm2d(torch::nn::BatchNormOptions(3).eps(0.1)));
  const auto weight = net->named_parameters()["1.weight"];
  net->named_parameters()["1.bias"].requires_grad_(false);
  net->eval();
  EXPECT_THAT(convert_sync_batch_norm(*net, ProcessGroup()), ElementsAre("1"));
  EXPECT_TRUE(net->named_parameters()["1.weight"].is_same(weight));
  EXPECT_FALSE(net->named_modules()["1"]->is_training());
  EXPECT_EQ(std::dynamic_pointer_cast<SyncBatchNormImpl>(net->named_modules()["1"])->options.eps(),
            0.1);
  EXPECT_THAT(convert_sync_batch_norm(*net, ProcessGroup()), ElementsAre());

  struct Typed : torch::nn::Module {
    Typed() {
      body = register_module("body", torch::nn::Sequential(torch::nn::BatchNorm1d(3)));
      norm = register_module("norm", torch::nn::BatchNorm1d(3));
    }
    torch::nn::Sequential body{nullptr};
    torch::nn::BatchNorm1d norm{nullptr};
  };
  Typed typed;
  try {
    convert_sync_batch_norm(typed, ProcessGroup());
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("not elements of one: norm;"),
                                    HasSubstr("tessera::SyncBatchNorm")));
  }
  EXPECT_NE(typed.body->ptr(0)->as<torch::nn::BatchNorm1dImpl>(), nullptr)
      << "the module must be unchanged";
}

TEST(SyncBatchNorm, RefusesWrongInputs) {
  SyncBatchNorm norm(torch::nn::BatchNormOptions(3), ProcessGroup());
  EXPECT_THROW(norm(at::ones({2, 4})), UsageError);
  EXPECT_THROW(norm(at::ones({3})), UsageError);
  EXPECT_THROW(norm(at::ones({0, 3})), UsageError);
  EXPECT_THROW(norm(at::ones({1, 3})), UsageError);
  SyncBatchNorm bare(torch::nn::BatchNormOptions(3).affine(false).track_running_stats(false),
                     ProcessGroup());
  EXPECT_TRUE(bare->parameters().empty());
  EXPECT_TRUE(bare->buffers().empty());
  EXPECT_NEAR(bare(at::randn({50, 3})).std().item<double>(), 1, 0.02);
}

}  // namespace
