#include <functional>
#include <memory>

#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/zero_redundancy_optimizer.h"

// Embeddings with sparse gradients.

namespace {

using namespace tessera;
using namespace tessera::testing;

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    words = register_module("words",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 5).sparse(true)));
    out = register_module("out", torch::nn::Linear(5, 3));
  }
  torch::Tensor forward(torch::Tensor tokens) { return out(words(tokens)); }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Words);

constexpr int kSparseSteps = 4;

at::Tensor tokens_of(int step, int rank) {
  return at::randint(11, {4}, at::make_generator<at::CPUGeneratorImpl>(100 * step + rank),
                     at::kLong);
}

OptimizerFactory adagrad() {
  return [](std::vector<torch::optim::OptimizerParamGroup> groups) {
    return std::make_unique<torch::optim::Adagrad>(std::move(groups),
                                                   torch::optim::AdagradOptions(0.05));
  };
}

std::vector<at::Tensor> weights_of(const Words& net) {
  std::vector<at::Tensor> result;
  for (const auto& each : net->parameters()) result.push_back(each.detach().clone());
  return result;
}

std::vector<at::Tensor> train_words_plainly(int world) {
  auto net = seeded<Words>(5);
  auto optimizer = adagrad()({torch::optim::OptimizerParamGroup(net->parameters())});
  for (int step = 0; step < kSparseSteps; ++step) {
    clear_gradients(net->parameters());
    for (int rank = 0; rank < world; ++rank)
      (net(tokens_of(step, rank)).square().mean() / world).backward();
    optimizer->step();
  }
  return weights_of(net);
}

/// Trains a rank's model and returns its weights.
using Train = std::function<std::vector<at::Tensor>(Words net, ProcessGroup group, int rank)>;

void expect_words(const std::string& name, const Train& train) {
  for (int world = 1; world <= 4; ++world) {
    const auto plain = train_words_plainly(world);
    run_ranks(world, [&](ProcessGroup group, int rank) {
      expect_close(train(seeded<Words>(5), group, rank), plain, name + std::to_string(world));
    });
  }
}

TEST(SparseGradients, DistributedDataParallel) {
  for (const bool accumulates : {false, true}) {
    expect_words("ddp", [=](Words net, const ProcessGroup& group, int rank) {
      DistributedDataParallel ddp(net, group, {});
      auto optimizer = adagrad()({torch::optim::OptimizerParamGroup(net->parameters())});
      for (int step = 0; step < kSparseSteps; ++step) {
        clear_gradients(net->parameters());
        if (accumulates) {
          const auto held = ddp.no_sync();
          (ddp(tokens_of(step, rank)).square().mean() / 2).backward();
        }
        (ddp(tokens_of(step, rank)).square().mean() / (accumulates ? 2 : 1)).backward();
        optimizer->step();
      }
      return weights_of(net);
    });
  }
}

TEST(SparseGradients, DistributedOptimizer) {
  for (const bool packs : {false, true}) {
    expect_words("distributed_optimizer", [=](Words net, ProcessGroup group, int rank) {
      DistributedOptimizer optimizer(*net, std::move(group), adagrad(),
                                     {.reduce_method = "mean", .param_pack = packs});
      for (int step = 0; step < kSparseSteps; ++step) {
        optimizer.zero_grad();
        optimizer.backward(net(tokens_of(step, rank)).square().mean());
        optimizer.step();
      }
      return weights_of(net);
    });
  }
}

TEST(SparseGradients, ZeroRedundancyOptimizer) {
  for (const auto partition : {Partition::flat, Partition::whole}) {
    expect_words("zero", [=](Words net, ProcessGroup group, int rank) {
      ZeroRedundancyOptimizerOptions options;
      options.partition = partition;
      ZeroRedundancyOptimizer optimizer(*net, std::move(group), adagrad(), options);
      for (int step = 0; step < kSparseSteps; ++step) {
        optimizer.zero_grad();
        net(tokens_of(step, rank)).square().mean().backward();
        optimizer.step();
      }
      return weights_of(net);
    });
  }
}

TEST(SparseGradients, FullyShardedDataParallel) {
  for (const bool leaves : {false, true}) {
    expect_words("fsdp", [=](Words net, ProcessGroup group, int rank) {
      FullyShardedDataParallelOptions options;
      if (leaves) options.wrap_policy = wrap_leaves();
      FullyShardedDataParallel fsdp(net, std::move(group), options);
      auto optimizer = adagrad()({torch::optim::OptimizerParamGroup(fsdp.parameters())});
      for (int step = 0; step < kSparseSteps; ++step) {
        fsdp.zero_grad(true);
        fsdp(tokens_of(step, rank)).square().mean().backward();
        optimizer->step();
      }
      const auto whole = fsdp.summon_full_params();
      return weights_of(net);
    });
  }
}

}  // namespace
