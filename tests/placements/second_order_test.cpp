// A loss with a function of the gradients in `.grad`, such as a gradient penalty.
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "placements/wrappers.h"
#include "tessera/detail/trainer_access.h"

namespace tessera::testing {
namespace {

using PenaltyNet = torch::nn::Sequential;

/// Its larger gradients are placed in their windows.
PenaltyNet penalised() {
  std::lock_guard lock(random_weights);
  torch::manual_seed(3);
  return PenaltyNet(torch::nn::Linear(5, 300), torch::nn::Tanh(), torch::nn::Linear(300, 3));
}

OptimizerFactory momentum() {
  return default_optimizers().factory("SGD", {{"lr", 0.002}, {"momentum", 0.5}});
}

/// Two steps of the loss plus the square norm of its gradient, and one of the loss alone.
template <class Forward, class TakeStep>
void train_penalised(PenaltyNet net, const at::Tensor& x, const Forward& forward,
                     const TakeStep& step) {
  for (int i = 0; i < 3; ++i) {
    net->zero_grad(/*set_to_none=*/true);
    at::Tensor penalty = torch::zeros({});
    if (i < 2) {
      forward(x).square().mean().backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      for (const auto& parameter : net->parameters())
        penalty = penalty + parameter.grad().square().sum();
      net->zero_grad(/*set_to_none=*/true);
    }
    (forward(x).square().mean() + penalty).backward();
    step();
  }
}

Tensors plain(const at::Tensor& x) {
  auto net = penalised();
  auto optimizer = momentum()({torch::optim::OptimizerParamGroup(net->parameters())});
  train_penalised(
      net, x, [&](const at::Tensor& in) { return net->forward(in); }, [&] { optimizer->step(); });
  return copies(net->parameters());
}

using TrainPenalised = std::function<Tensors(ProcessGroup group, const at::Tensor& x)>;

TrainPenalised ddp_of(DistributedDataParallelOptions options) {
  return [options](ProcessGroup group, const at::Tensor& x) {
    auto net = penalised();
    DistributedDataParallel<PenaltyNet> ddp(net, group, options);
    auto optimizer = momentum()({torch::optim::OptimizerParamGroup(net->parameters())});
    train_penalised(
        net, x, [&](const at::Tensor& in) { return ddp(in); }, [&] { optimizer->step(); });
    return copies(net->parameters());
  };
}

TrainPenalised zero_of(ZeroRedundancyOptimizerOptions options, bool in_place = false) {
  return [options, in_place](ProcessGroup group, const at::Tensor& x) {
    auto net = penalised();
    ZeroRedundancyOptimizer zero(*net, group, momentum(), options);
    if (in_place) tessera::zero::TrainerAccess::use_up_gradients(zero);
    train_penalised(
        net, x, [&](const at::Tensor& in) { return net->forward(in); }, [&] { zero.step(); });
    return copies(net->parameters());
  };
}

TrainPenalised distributed_of(bool packs) {
  return [packs](ProcessGroup group, const at::Tensor& x) {
    auto net = penalised();
    DistributedOptimizer optimizer(*net, group, momentum(),
                                   {.reduce_method = "mean", .param_pack = packs});
    train_penalised(
        net, x, [&](const at::Tensor& in) { return net->forward(in); }, [&] { optimizer.step(); });
    return copies(net->parameters());
  };
}

const std::vector<std::pair<std::string, TrainPenalised>> kReducing{
    {"ddp", ddp_of({})},
    {"ddp, small buckets", ddp_of({.first_bucket_mb = 1e-3, .bucket_cap_mb = 1e-3})},
    {"ddp, unused", ddp_of({.find_unused_parameters = true})},
    {"ddp, in background", ddp_of({.overlap = Overlap::background})},
    {"distributed optimizer", distributed_of(false)},
    {"distributed optimizer, packed", distributed_of(true)}};
const std::vector<std::pair<std::string, TrainPenalised>> kZero{
    {"zero", zero_of({})},
    {"zero, in background", zero_of({.overlap = Overlap::background})},
    {"zero, in place", zero_of({}, true)}};

void expect_plain(int world, const std::string& name, const TrainPenalised& train, bool same_data) {
  SCOPED_TRACE(name + " on " + std::to_string(world));
  const auto rows = [&](int rank) { return random_batch({4, 5}, same_data ? 9 : 9 + rank); };
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world; ++rank) all.push_back(rows(rank));
  const auto expected = plain(same_data ? rows(0) : torch::cat(all));
  run_ranks(world, [&](ProcessGroup group, int rank) {
    expect_close(train(group, rows(rank)), expected, name);
  });
}

TEST(SecondOrder, AFunctionOfTheGradientTrainsAsInPlainTraining) {
  for (const int world : {1, 2}) {
    for (const auto& [name, train] : kReducing) expect_plain(world, name, train, true);
    for (const auto& [name, train] : kZero) expect_plain(world, name, train, true);
  }
}

TEST(SecondOrder, AFunctionOfTheMeanGradientTrainsAsOnAllData) {
  for (const int world : {2, 3})
    for (const auto& [name, train] : kReducing) expect_plain(world, name, train, false);
}

/// The penalty of the first loop, without a graph: the test above must not pass without it.
TEST(SecondOrder, ThePenaltyChangesTheResult) {
  const auto x = random_batch({4, 5}, 9);
  auto net = penalised();
  auto optimizer = momentum()({torch::optim::OptimizerParamGroup(net->parameters())});
  for (int i = 0; i < 3; ++i) {
    net->zero_grad(true);
    net->forward(x).square().mean().backward();
    optimizer->step();
  }
  EXPECT_GT((net->parameters()[0] - plain(x)[0]).abs().max().item<double>(), 1e-3);
}

}  // namespace
}  // namespace tessera::testing
