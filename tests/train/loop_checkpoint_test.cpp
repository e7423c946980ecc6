#include "tessera/train/loop_checkpoint.h"

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "harness/thrown_by.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/train/registries.h"
#include "train/train_fixture.h"

// save() and load() of a loop of one's own: a stopped loop goes on with the same bits, also its
// buffer of samples and its dropout.

namespace tessera {
namespace {

/// The same values on all ranks, which share the generator of the test.
torch::nn::Sequential small_net(double dropout = 0) {
  torch::nn::Sequential net(torch::nn::Linear(3, 7), torch::nn::Tanh(), torch::nn::Dropout(dropout),
                            torch::nn::Linear(7, 1));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters())
    parameter.copy_(at::arange(parameter.numel(), at::kFloat).sin().view_as(parameter));
  return net;
}

enum class Kind { ddp, zero, zero_shared, fsdp };

/// Trains on this rank's buffer from the newest checkpoint up to `end` steps, saves, and returns
/// the losses.
std::vector<double> train_loop(Kind kind, ProcessGroup group, int64_t end) {
  auto net = small_net(group.size() == 1 ? 0.2 : 0);  // ranks of a test share their generator
  torch::manual_seed(100);
  SampleBuffer buffer({.capacity = 12, .seed = static_cast<uint64_t>(group.rank())});
  const CheckpointStore store("loop", group);
  const torch::optim::AdamOptions options(0.02);
  std::vector<double> losses;
  const auto run = [&](LoopParts parts, auto forward, torch::optim::Optimizer& optimizer) {
    for (int64_t step = load(store, parts); step < end; ++step) {
      const at::Tensor i = at::arange(5, at::kFloat) + step * 10 + group.rank();
      buffer.add(at::stack({i.sin(), i.cos(), i * 0.01}, 1), (i * 0.3).sin().unsqueeze(1));
      const Batch batch = buffer.draw(4);
      optimizer.zero_grad();
      const at::Tensor loss = at::mse_loss(forward(batch.inputs), batch.targets);
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
    if (!losses.empty()) EXPECT_TRUE(std::filesystem::exists(save(store, end, parts)));
  };
  if (kind == Kind::ddp) {
    DistributedDataParallel ddp(net, group);
    torch::optim::Adam optimizer(net->parameters(), options);
    run(
        {*net, optimizer, &buffer}, [&](at::Tensor x) { return ddp(x); }, optimizer);
  } else if (kind != Kind::fsdp) {
    ZeroRedundancyOptimizer optimizer(*net, group,
                                      default_optimizers().factory("Adam", {{"lr", 0.02}}),
                                      {.share_parameters = kind == Kind::zero_shared});
    run(
        {*net, optimizer, &buffer}, [&](at::Tensor x) mutable { return net->forward(x); },
        optimizer);
  } else {
    FullyShardedDataParallel fsdp(net, group);
    torch::optim::Adam optimizer(fsdp.parameters(), options);
    run(
        {fsdp, optimizer, &buffer}, [&](at::Tensor x) { return fsdp(x); }, optimizer);
  }
  return losses;
}

class LoopCheckpoint : public testing::TrainFixture {
 protected:
  /// The losses of rank 0.
  static std::vector<double> loop(Kind kind, int world, int64_t end) {
    std::vector<double> result;
    testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
      const auto losses = train_loop(kind, group, end);
      if (rank == 0) result = losses;
    });
    return result;
  }
};

TEST_F(LoopCheckpoint, AStoppedLoopGoesOnWithTheSameBits) {
  for (const Kind kind : {Kind::ddp, Kind::zero, Kind::zero_shared, Kind::fsdp}) {
    for (const int world : {1, 2, 3}) {
      std::filesystem::remove_all("loop");
      const auto straight = loop(kind, world, 8);
      std::filesystem::remove_all("loop");
      auto parts = loop(kind, world, 3);
      const auto rest = loop(kind, world, 8);
      parts.insert(parts.end(), rest.begin(), rest.end());
      EXPECT_EQ(texts(parts), texts(straight)) << static_cast<int>(kind) << " world " << world;
    }
  }
}

/// Steps [from, end) with momentum. The last layer is frozen in steps [`begin`, `stop`).
at::Tensor train_frozen(Kind kind, const ProcessGroup& group, int64_t end, int64_t begin,
                        int64_t stop) {
  auto net = small_net();
  const auto layer = net->ptr(3);
  const auto freeze = [&](int64_t step) {
    for (auto& parameter : layer->parameters())
      parameter.set_requires_grad(step < begin || step >= stop);
  };
  freeze(0);
  const CheckpointStore store("loop", group);
  const auto factory = default_optimizers().factory("SGD", {{"lr", 0.1}, {"momentum", 0.9}});
  const auto run = [&](LoopParts parts, auto forward, torch::optim::Optimizer& optimizer) {
    for (int64_t step = load(store, parts); step < end; ++step) {
      freeze(step);
      const at::Tensor i = at::arange(5, at::kFloat) + step * 10 + group.rank();
      for (const auto& parameter : optimizer.param_groups()[0].params())
        parameter.mutable_grad() = at::Tensor();
      at::mse_loss(forward(at::stack({i.sin(), i.cos(), i * 0.01}, 1)), i.sin().unsqueeze(1))
          .backward();
      optimizer.step();
    }
    save(store, end, parts);
  };
  if (kind == Kind::ddp) {
    DistributedDataParallel ddp(net, group);
    const auto optimizer = factory({torch::optim::OptimizerParamGroup(net->parameters())});
    run(
        {*net, *optimizer}, [&](at::Tensor x) { return ddp(x); }, *optimizer);
  } else if (kind != Kind::fsdp) {
    ZeroRedundancyOptimizer optimizer(*net, group, factory,
                                      {.share_parameters = kind == Kind::zero_shared});
    run(
        {*net, optimizer}, [&](at::Tensor x) mutable { return net->forward(x); }, optimizer);
  } else {
    FullyShardedDataParallel fsdp(net, group);
    const auto optimizer = factory({torch::optim::OptimizerParamGroup(fsdp.parameters())});
    run(
        {fsdp, *optimizer}, [&](at::Tensor x) { return fsdp(x); }, *optimizer);
    return fsdp.full_parameter("3.weight", -1);
  }
  return net->parameters()[2].detach().clone();
}

TEST_F(LoopCheckpoint, ALayerThatIsFrozenForAWhileKeepsItsState) {
  for (const Kind kind : {Kind::ddp, Kind::zero, Kind::zero_shared, Kind::fsdp}) {
    for (const auto& [begin, stop, pause] :
         std::vector<std::array<int64_t, 3>>{{2, 6, 4}, {0, 3, 5}, {0, 3, 2}, {0, 7, 5}}) {
      std::filesystem::remove_all("loop");
      at::Tensor straight, parts;
      const auto go = [&](int64_t end, at::Tensor& weight) {
        testing::run_ranks(2, [&](const ProcessGroup& group, int rank) {
          const auto values = train_frozen(kind, group, end, begin, stop);
          if (rank == 0) weight = values;
        });
      };
      go(9, straight);
      std::filesystem::remove_all("loop");
      for (const int64_t to : {pause, pause + 1, int64_t{9}}) go(to, parts);
      EXPECT_TRUE(at::equal(parts, straight)) << static_cast<int>(kind) << " frozen from " << begin;
    }
  }
}

TEST_F(LoopCheckpoint, AnotherNumberOfRanksGetsAllSamples) {
  loop(Kind::zero, 3, 2);
  for (const int world : {1, 2, 4}) {
    testing::run_ranks(world, [&](const ProcessGroup& group, int rank) {
      auto net = small_net();
      torch::optim::Adam optimizer(net->parameters());
      SampleBuffer buffer;  // each of the three ranks had seen ten
      const CheckpointStore store("loop", group);
      const auto expected = world == 1   ? 30
                            : world == 2 ? (rank == 0 ? 20 : 10)
                                         : (rank < 3 ? 10 : 0);
      SampleBuffer all({.capacity = 12, .seed = 1});
      if (world != 1) {
        EXPECT_EQ(load(store, {*net, optimizer, &all}), 2);
        EXPECT_EQ(all.seen(), expected);
      }
      SampleBuffer unbounded;
      EXPECT_EQ(load(store, {*net, optimizer, &unbounded}), 2);
      EXPECT_EQ(unbounded.size(), expected);
    });
  }
}

/// Rank 1 has no shard, so that the state of another optimizer is no problem there.
TEST_F(LoopCheckpoint, AnErrorOfOneRankIsThrownOnAll) {
  const auto errors = testing::run_ranks_catching(2, [](const ProcessGroup& group, int) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 1).bias(false));
    const CheckpointStore store("loop", group);
    for (const std::string type : {"SGD", "Adam"}) {
      const OptionMap options = type == "SGD" ? OptionMap{{"momentum", 0.9}} : OptionMap();
      ZeroRedundancyOptimizer optimizer(*net, group, default_optimizers().factory(type, options),
                                        {.partition = Partition::whole});
      load(store, {*net, optimizer});
      net(at::ones({2, 3})).sum().backward();
      optimizer.step();
      save(store, 1, {*net, optimizer});
    }
  });
  for (const auto& error : errors)
    EXPECT_NE(testing::message_of(error).find("the tensor exp_avg is missing"), std::string::npos)
        << testing::message_of(error);
}

TEST_F(LoopCheckpoint, WithoutACheckpointNothingChanges) {
  auto net = small_net(), same = small_net();
  torch::optim::Adam optimizer(net->parameters());
  EXPECT_EQ(load(CheckpointStore("loop"), {*net, optimizer}), 0);
  for (size_t i = 0; i < net->parameters().size(); ++i)
    EXPECT_TRUE(at::equal(net->parameters()[i], same->parameters()[i]));
}

TEST_F(LoopCheckpoint, ALoopWithSamplesThatAreNotFiniteGoesOn) {
  auto net = small_net();
  torch::optim::Adam optimizer(net->parameters());
  SampleBuffer buffer, loaded;
  buffer.add(at::full({2, 3}, NAN), at::ones({2, 1}));
  const CheckpointStore store("loop");
  for (const int64_t step : {3, 5}) save(store, step, {*net, optimizer, &buffer});
  EXPECT_EQ(load(store, {*net, optimizer, &loaded}), 5);
  EXPECT_EQ(loaded.size(), 2);
  save(store, 7, {*net, optimizer});
  save(store, 8, {*net, optimizer, &buffer});
  EXPECT_EQ(load(store, {*net, optimizer}), 7);
}

TEST_F(LoopCheckpoint, MissingSamplesAreAnErrorThatChangesNothing) {
  auto net = small_net(), same = small_net();
  torch::optim::Adam optimizer(net->parameters());
  SampleBuffer buffer;
  const CheckpointStore store("loop");
  {
    const torch::NoGradGuard no_grad;
    net->parameters()[0].zero_();
    save(store, 4, {*net, optimizer});
    net->parameters()[0].copy_(same->parameters()[0]);
  }
  EXPECT_NE(testing::thrown_by([&] {
              load(store, {*net, optimizer, &buffer});
            }).find("it has no samples; expected a checkpoint of a loop with a SampleBuffer"),
            std::string::npos);
  EXPECT_TRUE(at::equal(net->parameters()[0], same->parameters()[0]));
  EXPECT_EQ(load(store, {*net, optimizer}), 4);
  EXPECT_EQ(net->parameters()[0].abs().sum().item<float>(), 0);
}

}  // namespace
}  // namespace tessera
