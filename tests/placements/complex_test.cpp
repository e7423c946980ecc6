#include <functional>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

// Trainable complex parameters, as in a Fourier neural operator.

namespace {

using namespace tessera;
using namespace tessera::testing;

/// Filters spectra, between real layers. Parameters of odd sizes.
struct FourierImpl : torch::nn::Module {
  FourierImpl() {
    in = register_module("in", torch::nn::Linear(3, 6));
    filter = register_parameter("filter", torch::randn({4, 4, 3}, at::kComplexFloat));
    shift = register_parameter("shift", torch::randn({5}, at::kComplexFloat));
    out = register_module("out", torch::nn::Linear(6, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto spectrum = at::fft_rfft(torch::tanh(in(x)));  // batch x 4
    const auto mixed = at::einsum("bi,ijk->bj", {spectrum, filter}) + shift.sum();
    return out(at::fft_irfft(mixed, 6));
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
  torch::Tensor filter, shift;
};
TORCH_MODULE(Fourier);

at::Tensor inputs(int step, int rank) {
  return at::randn({4, 3}, at::make_generator<at::CPUGeneratorImpl>(100 * step + rank));
}

constexpr int kSteps = 4;

OptimizerFactory factory() {
  return [](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<torch::optim::SGD>(std::move(groups),
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  };
}

std::vector<at::Tensor> train_plainly(int world) {
  auto net = seeded<Fourier>(5);
  const auto parameters = net->parameters();
  auto optimizer = factory()({torch::optim::OptimizerParamGroup(parameters)});
  for (int step = 0; step < kSteps; ++step) {
    clear_gradients(parameters);
    for (int rank = 0; rank < world; ++rank)
      (net(inputs(step, rank)).square().mean() / world).backward();
    torch::nn::utils::clip_grad_norm_(parameters, 1.0);
    optimizer->step();
  }
  std::vector<at::Tensor> result;
  for (const auto& each : parameters) result.push_back(each.detach().clone());
  return result;
}

/// One step of a rank's loop: (net, group) -> a function that trains one step, and one at the end.
struct Trainer {
  std::function<void(const at::Tensor& x)> step;
  std::function<std::vector<at::Tensor>()> weights;
};
using Make = std::function<Trainer(Fourier net, ProcessGroup group)>;

void expect_parity(const std::string& name, const Make& make) {
  for (const auto& hosts :
       std::vector<std::vector<int>>{{0}, {0, 0}, {0, 1}, {0, 0, 0}, {0, 0, 1, 1}}) {
    const auto plain = train_plainly(static_cast<int>(hosts.size()));
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      const auto trainer = make(seeded<Fourier>(5), group);
      for (int step = 0; step < kSteps; ++step) trainer.step(inputs(step, rank));
      expect_close(trainer.weights(), plain, name + ::testing::PrintToString(hosts));
    });
  }
}

std::vector<at::Tensor> values(const Fourier& net) {
  std::vector<at::Tensor> result;
  for (const auto& each : net->parameters()) result.push_back(each.detach().clone());
  return result;
}

TEST(Complex, DistributedDataParallel) {
  expect_parity("ddp", [](Fourier net, ProcessGroup group) {
    auto ddp = std::make_shared<DistributedDataParallel<Fourier>>(net, group);
    std::shared_ptr<torch::optim::Optimizer> optimizer =
        factory()({torch::optim::OptimizerParamGroup(net->parameters())});
    return Trainer{[=](const at::Tensor& x) {
                     clear_gradients(net->parameters());
                     (*ddp)(x).square().mean().backward();
                     torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
                     optimizer->step();
                   },
                   [net] { return values(net); }};
  });
}

TEST(Complex, DistributedOptimizer) {
  for (const bool packs : {false, true}) {
    expect_parity("distributed_optimizer", [packs](Fourier net, ProcessGroup group) {
      auto optimizer = std::make_shared<DistributedOptimizer>(
          *net, group, factory(),
          DistributedOptimizerOptions{.reduce_method = "mean", .param_pack = packs});
      return Trainer{[=](const at::Tensor& x) mutable {
                       optimizer->zero_grad();
                       optimizer->backward(net(x).square().mean());
                       torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
                       optimizer->step();
                     },
                     [net, optimizer] { return values(net); }};
    });
  }
}

TEST(Complex, ZeroRedundancyOptimizer) {
  for (const auto partition : {Partition::flat, Partition::whole}) {
    for (const bool shards : {false, true}) {
      ZeroRedundancyOptimizerOptions options;
      options.partition = partition;
      options.shard_gradients = shards;
      expect_parity("zero", [options](Fourier net, ProcessGroup group) {
        auto optimizer = std::make_shared<ZeroRedundancyOptimizer>(*net, group, factory(), options);
        return Trainer{[=](const at::Tensor& x) mutable {
                         optimizer->zero_grad();
                         net(x).square().mean().backward();
                         optimizer->clip_grad_norm_(1.0);
                         optimizer->step();
                       },
                       [net, optimizer] { return values(net); }};
      });
    }
  }
}

TEST(Complex, FullyShardedDataParallel) {
  for (const auto partition : {Partition::flat, Partition::whole}) {
    for (const bool leaves : {false, true}) {
      FullyShardedDataParallelOptions options;
      options.partition = partition;
      if (leaves) options.wrap_policy = wrap_leaves();
      expect_parity("fsdp", [options](Fourier net, ProcessGroup group) {
        auto fsdp = std::make_shared<FullyShardedDataParallel<Fourier>>(net, group, options);
        std::shared_ptr<torch::optim::Optimizer> optimizer =
            factory()({torch::optim::OptimizerParamGroup(fsdp->parameters())});
        return Trainer{[=](const at::Tensor& x) {
                         fsdp->zero_grad(true);
                         (*fsdp)(x).square().mean().backward();
                         fsdp->clip_grad_norm_(1.0);
                         optimizer->step();
                       },
                       [=] {
                         const auto whole = fsdp->summon_full_params();
                         return values(net);
                       }};
      });
    }
  }
}

}  // namespace
