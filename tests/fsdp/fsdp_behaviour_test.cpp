#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

using Options = FullyShardedDataParallelOptions;

TEST(FsdpCounts, GathersAndReductionsOfAStep) {
  for (const auto prefetch :
       {BackwardPrefetch::none, BackwardPrefetch::pre, BackwardPrefetch::post}) {
    for (int world = 2; world <= 4; ++world) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Chain>(1);
        auto options = every_leaf();
        options.backward_prefetch = prefetch;
        FullyShardedDataParallel fsdp(net, group, options);
        torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
        step(fsdp, optimizer, rows(0, rank, world));
        for (int i = 1; i < 4; ++i) {
          fsdp.reset_stats();
          group.reset_stats();
          step(fsdp, optimizer, rows(i, rank, world));
          EXPECT_EQ(fsdp.stats().gathers_forward, 6u);  // the root has no parameters of its own
          EXPECT_LE(fsdp.stats().gathers_backward, 5u);
          EXPECT_EQ(fsdp.stats().reductions, 6u);
          EXPECT_EQ(group.stats().all_gather.calls,
                    fsdp.stats().gathers_forward + fsdp.stats().gathers_backward);
          EXPECT_EQ(group.stats().reduce_scatter.calls, 6u);
          EXPECT_EQ(group.stats().all_reduce.calls, 0u);
          EXPECT_LE(fsdp.stats().peak_gathered_bytes, 2 * 12 * 4);
          EXPECT_GT(fsdp.stats().peak_gradient_bytes, 0);
          EXPECT_LE(fsdp.stats().peak_gradient_bytes,
                    3 * 12 * 4);  // one is filled while two are reduced
          EXPECT_EQ(fsdp.stats().gathered_bytes, 0);
          if (prefetch == BackwardPrefetch::pre) EXPECT_GE(fsdp.stats().prefetches, 3u);
        }
        torch::NoGradGuard evaluating;
        fsdp(rows(0));
        EXPECT_EQ(fsdp.stats().gathered_bytes, 0);
      });
    }
  }
}

TEST(FsdpCounts, ShardGradOpGathersOnceAStep) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    auto options = every_leaf();
    options.sharding_strategy = ShardingStrategy::shard_grad_op;
    FullyShardedDataParallel fsdp(net, group, options);
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      fsdp.reset_stats();
      step(fsdp, optimizer, rows(i, rank, 2));
      EXPECT_EQ(fsdp.stats().gathers_forward, 6u);
      EXPECT_EQ(fsdp.stats().gathers_backward, 0u);
      EXPECT_EQ(fsdp.stats().reductions, 6u);
    }
  });
}

TEST(FsdpCounts, WithinTheBudgetTheUnitsUsedSoonestStay) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    auto options = every_leaf();
    options.resident_bytes = 4 * 12 * 4;
    options.backward_prefetch = BackwardPrefetch::none;
    FullyShardedDataParallel fsdp(net, group, options);
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      fsdp.reset_stats();
      step(fsdp, optimizer, rows(i, rank, 2));
      EXPECT_LE(fsdp.stats().peak_gathered_bytes, options.resident_bytes);
    }
    // Of six units four stay. By Belady's rule two are gathered again, but backward does not
    // use the weight of the first.
    EXPECT_EQ(fsdp.stats().gathers_forward, 6u);
    EXPECT_EQ(fsdp.stats().gathers_backward, 1u);
  });
}

TEST(FsdpCounts, NestedUnitsAreGatheredOnceFromTheFirstStepOn) {
  struct OuterImpl : torch::nn::Module {
    OuterImpl() {
      before = register_module("before", torch::nn::Linear(3, 3));
      attention = register_module("attention", torch::nn::Linear(3, 3));
      between = register_module("between", torch::nn::Linear(3, 3));
      mlp = register_module("mlp", torch::nn::Linear(3, 3));
      after = register_module("after", torch::nn::LayerNorm(torch::nn::LayerNormOptions({3})));
    }
    torch::Tensor forward(torch::Tensor x) { return after(mlp(between(attention(before(x))))); }
    torch::nn::Linear before{nullptr}, attention{nullptr}, between{nullptr}, mlp{nullptr};
    torch::nn::LayerNorm after{nullptr};
  };
  run_ranks(2, [&](ProcessGroup group, int rank) {
    Options options;
    options.wrap_policy = wrap_by_name({"0", "0.attention", "0.mlp"});
    options.resident_bytes = (12 + 12 + 6 + 12) * 4;
    torch::nn::Sequential net(std::make_shared<OuterImpl>(), torch::nn::Linear(3, 2));
    FullyShardedDataParallel fsdp(net, group, options);
    for (int i = 0; i < 3; ++i) {
      fsdp.reset_stats();
      loss_of(fsdp(rows(i, rank, 2))).backward();
      EXPECT_EQ(fsdp.stats().gathers_forward, 4u) << "step " << i;
      EXPECT_LE(fsdp.stats().gathers_backward, 3u) << "step " << i;
    }
  });
}

TEST(FsdpCounts, UnchangedUnitsStayWithinTheBudget) {
  run_ranks(3, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    auto options = every_leaf();
    options.resident_bytes = 1 << 20;
    FullyShardedDataParallel fsdp(net, group, options);
    torch::NoGradGuard no_grad;
    const auto first = fsdp(rows(0));
    fsdp.reset_stats();
    EXPECT_TRUE(at::equal(fsdp(rows(0)), first));
    EXPECT_EQ(fsdp.stats().gathers_forward, 0u);
    for (auto p : fsdp.parameters()) p.mul_(2);  // a change on all ranks
    EXPECT_FALSE(at::equal(fsdp(rows(0)), first));
    EXPECT_EQ(fsdp.stats().gathers_forward, 6u);
    fsdp.reset_stats();
    if (rank == 1) fsdp.parameters()[0].add_(1);  // a change on one rank only
    fsdp(rows(0));
    EXPECT_EQ(fsdp.stats().gathers_forward, 1u);
  });
}

TEST(FsdpCounts, AtMostTwoUnitsArePrefetched) {
  struct Net : ChainImpl {
    Net() : ChainImpl(8) {}
    torch::Tensor forward(torch::Tensor x, int stride) {
      for (size_t i = 0; i < list->size(); i += stride)
        x = torch::tanh(list[i]->as<torch::nn::Linear>()->forward(x));
      return x;
    }
  };
  run_ranks_on({0, 1}, [&](ProcessGroup group, int rank) {
    auto options = every_leaf();
    options.resident_bytes = 1 << 20;
    FullyShardedDataParallel fsdp(std::make_shared<Net>(), group, options);
    loss_of(fsdp(rows(0, rank, 2), 1)).backward();
    fsdp.reset_stats();
    fsdp(rows(0, rank, 2), 2);  // uses units 0, 2, 4, 6; the record predicts 1, 3, 5, 7 too
    EXPECT_EQ(fsdp.stats().gathers_forward, 4u + 2u);
    EXPECT_EQ(fsdp.stats().prefetches, 3u);  // 1, 2 and 3
  });
}

TEST(FsdpCounts, GradientsOfUnusedParametersAreNotWaitedFor) {
  struct Block : torch::nn::Module {
    Block() {
      weight = register_parameter("weight", torch::eye(4));
      unused = register_parameter("unused", torch::ones({4, 4}));
    }
    torch::Tensor weight, unused;
  };
  struct Net : torch::nn::Module {
    Net() {
      for (int i = 0; i < 6; ++i)
        blocks.push_back(register_module("b" + std::to_string(i), std::make_shared<Block>()));
    }
    torch::Tensor forward(torch::Tensor x) {
      for (const auto& block : blocks) x = torch::tanh(x.mm(block->weight));
      return x;
    }
    std::vector<std::shared_ptr<Block>> blocks;
  };
  run_ranks(2, [&](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(std::make_shared<Net>(), group, every_leaf());
    for (int i = 0; i < 2; ++i) {
      fsdp.reset_stats();
      loss_of(fsdp(torch::ones({2, 4}))).backward();
    }
    EXPECT_EQ(fsdp.stats().reductions, 6u);
    EXPECT_LE(fsdp.stats().peak_gradient_bytes,
              3 * 32 * 4);  // unused parameters are no longer expected
  });
}

struct TiedRootImpl : torch::nn::Module {
  TiedRootImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(50, 4));
    block = register_module("block", torch::nn::Linear(4, 4));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  }
  torch::Tensor forward(torch::Tensor tokens) {
    auto x = torch::tanh(block(embedding(tokens)));
    if (fails && x.requires_grad())
      x.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a bad gradient"); });
    return torch::nn::functional::linear(norm(x), embedding->weight);
  }
  bool fails = false;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear block{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(TiedRoot);

TEST(FsdpCounts, TheGradientsOfATiedRootReuseTheMemoryOfItsParameters) {
  constexpr int64_t kRoot = (50 * 4 + 2 * 4) * 4, kBlock = 20 * 4;
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<TiedRoot>(1), plain = seeded<TiedRoot>(1);
    FullyShardedDataParallel fsdp(net, group, {.wrap_policy = wrap_by_name({"block"})});
    torch::optim::SGD optimizer(fsdp.parameters(), 0.5), other(plain->parameters(), 0.5);
    const auto tokens = at::arange(12).view({3, 4}) * 4;
    for (int i = 0; i < 3; ++i) {
      fsdp.reset_stats();
      step(fsdp, optimizer, tokens);
      step(plain, other, tokens);
      EXPECT_EQ(fsdp.stats().gathers_forward + fsdp.stats().gathers_backward, 2u) << i;
      EXPECT_EQ(fsdp.stats().peak_gathered_bytes, kRoot + kBlock);
      EXPECT_LE(fsdp.stats().peak_bytes, kRoot + 3 * kBlock) << i;
      EXPECT_EQ(fsdp.stats().gradient_bytes, 0);
    }
    for (const auto& parameter : net->parameters())  // placeholders of one element
      EXPECT_EQ(parameter.grad().storage().nbytes(), sizeof(float));
    const auto whole = fsdp.summon_full_params();
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6)) << i;
  });
}

TEST(FsdpGradients, ABackwardThatThrowsLeavesNoGradients) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<TiedRoot>(1), plain = seeded<TiedRoot>(1);
    FullyShardedDataParallel fsdp(net, group, {.wrap_policy = wrap_by_name({"block"})});
    torch::optim::SGD optimizer(fsdp.parameters(), 0.5), other(plain->parameters(), 0.5);
    const auto tokens = at::arange(12).view({3, 4}) * 4;
    for (int i = 0; i < 3; ++i) {
      net->fails = true;
      EXPECT_THROW(loss_of(fsdp(tokens)).backward(), std::runtime_error);
      EXPECT_THAT(thrown_by([&] { net->norm->weight + 1; }), HasSubstr("norm.weight"));
      net->fails = false;
      step(fsdp, optimizer, tokens);
      step(plain, other, tokens);
    }
    EXPECT_EQ(fsdp.stats().gradient_bytes, 0);
    const auto whole = fsdp.summon_full_params();
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(at::allclose(net->parameters()[i], plain->parameters()[i], 1e-5, 1e-6)) << i;
  });
}

TEST(FsdpGradients, AReductionThatOutlivesTheWrapperWritesNothing) {
  std::promise<void> gone;
  const auto errors = run_ranks_catching(
      2, [&, wrapper_gone = gone.get_future().share()](ProcessGroup group, int rank) {
        auto net = seeded<Chain>(1);
        auto options = every_leaf();
        options.sharding_strategy =
            ShardingStrategy::shard_grad_op;  // no gathers in backward, which would wait for rank 1
        auto fsdp = std::make_unique<FullyShardedDataParallel<Chain>>(net, group, options);
        loss_of((*fsdp)(rows(0))).backward();  // makes the slots, which is collective
        fsdp->reset_stats();
        auto loss = loss_of((*fsdp)(rows(0)));
        if (rank == 1) {
          wrapper_gone.wait_for(std::chrono::seconds(10));
          return loss.backward();
        }
        net->list[4]->as<torch::nn::Linear>()->weight.register_hook(
            [](at::Tensor) -> at::Tensor { throw std::runtime_error("inside backward"); });
        EXPECT_THROW(loss.backward(), std::runtime_error);
        EXPECT_EQ(fsdp->stats().reductions, 1u);
        fsdp.reset();
        gone.set_value();
        group.barrier();  // runs after the reduction
      });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), HasSubstr("rank 0 calls barrier"));
}

TEST(FsdpCounts, FrozenParametersAreNeitherReducedNorGivenGradients) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    for (auto* each : {&net, &plain}) {
      for (int i = 1; i < 4; ++i)
        for (auto p : (*each)->list[i]->parameters()) p.requires_grad_(false);
      (*each)->head->bias.requires_grad_(false);
    }
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      fsdp.reset_stats();
      group.reset_stats();
      step(fsdp, optimizer, rows(i, rank, 2));
      step(plain, reference, rows(i));
      EXPECT_EQ(fsdp.stats().reductions, 3u);
      EXPECT_EQ(group.stats().reduce_scatter.calls, 3u);
    }
    EXPECT_LE(fsdp.memory().gradients, (2 * 12 + 6) * 4 / 2 + 3 * 4);
    for (auto& [name, value] : fsdp.state_dict(-1))
      ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
  });
}

TEST(FsdpGradients, AccumulateUnshardedUnderNoSyncAndShardedWithout) {
  for (int world = 1; world <= 4; ++world) {
    for (const bool no_sync : {true, false}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
        FullyShardedDataParallel fsdp(net, group, every_leaf());
        torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
        for (int round = 0; round < 3; ++round) {
          optimizer.zero_grad();
          reference.zero_grad();
          fsdp.reset_stats();
          for (int micro = 0; micro < 3; ++micro) {
            loss_of(plain(rows(10 * round + micro))).backward();
            if (no_sync && micro < 2) {
              auto scope = fsdp.no_sync();
              loss_of(fsdp(rows(10 * round + micro, rank, world))).backward();
              EXPECT_EQ(fsdp.stats().reductions, 0u);
            } else {
              loss_of(fsdp(rows(10 * round + micro, rank, world))).backward();
            }
          }
          EXPECT_EQ(fsdp.stats().reductions, no_sync ? 6u : 18u);
          optimizer.step();
          reference.step();
        }
        for (auto& [name, value] : fsdp.state_dict(-1))
          ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6))
              << name << " world " << world;
      });
    }
  }
}

TEST(FsdpGradients, SeveralForwardsBeforeOneBackward) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      reference.zero_grad();
      (loss_of(fsdp(rows(i, rank, 2))) + loss_of(fsdp(rows(i + 50, rank, 2)))).backward();
      (loss_of(plain(rows(i))) + loss_of(plain(rows(i + 50)))).backward();
      optimizer.step();
      reference.step();
    }
    for (auto& [name, value] : fsdp.state_dict(-1))
      ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
  });
}

TEST(FsdpGradients, CheckpointedBlocks) {
  struct CheckpointedImpl : torch::nn::Module {
    explicit CheckpointedImpl(bool c) : checkpointed(c) {
      first = register_module("first", torch::nn::Linear(3, 5));
      shared = register_module("shared", torch::nn::Linear(5, 5));
      last = register_module("last", torch::nn::Linear(5, 2));
    }
    torch::Tensor forward(torch::Tensor x) {
      const auto block = [this](torch::Tensor h) {
        return torch::tanh(torch::dropout(shared(torch::tanh(h)), 0.3, true));
      };
      const auto run = [&](torch::Tensor h) {
        return checkpointed ? tessera::checkpoint(block, h) : block(h);
      };
      return last(run(run(first(x))));
    }
    bool checkpointed;
    torch::nn::Linear first{nullptr}, shared{nullptr}, last{nullptr};
  };
  // Dropout uses the generator of the process, which all ranks (threads) share. So values are
  // compared with dropout on one rank and without on several.
  torch::manual_seed(3);
  auto plain = std::make_shared<CheckpointedImpl>(false);
  auto checkpointed = std::make_shared<CheckpointedImpl>(true);
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      checkpointed->parameters()[i].copy_(plain->parameters()[i]);
  }
  torch::manual_seed(5);
  loss_of(plain->forward(rows(0))).backward();
  torch::manual_seed(5);
  loss_of(checkpointed->forward(rows(0))).backward();
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    ASSERT_TRUE(at::allclose(plain->parameters()[i].grad(), checkpointed->parameters()[i].grad(),
                             1e-5, 1e-6))
        << i;
  }
}

struct CheckpointChainImpl : torch::nn::Module {
  explicit CheckpointChainImpl(bool c) : checkpointed(c) {
    for (int i = 0; i < 3; ++i) list->push_back(torch::nn::Linear(3, 3));
    register_module("list", list);
    head = register_module("head", torch::nn::Linear(3, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int repeat = 0; repeat < 2; ++repeat) {
      for (const auto& module : *list) {
        const auto block = [linear = module->as<torch::nn::Linear>()](torch::Tensor h) {
          return torch::tanh(linear->forward(h));
        };
        x = checkpointed ? tessera::checkpoint(block, x) : block(x);
      }
    }
    return head(x);
  }
  bool checkpointed;
  torch::nn::ModuleList list;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(CheckpointChain);

TEST(FsdpGradients, CheckpointingInsideShardedAndReplicatedModels) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto plain = seeded<CheckpointChain>(1, false), net = seeded<CheckpointChain>(1, true),
           other = seeded<CheckpointChain>(1, true);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      DistributedDataParallel ddp(other, group,
                                  {.find_unused_parameters = false, .static_graph = true});
      torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1),
          replicated(other->parameters(), 0.1);
      for (int i = 0; i < 4; ++i) {
        step(fsdp, optimizer, rows(i, rank, world));
        step(plain, reference, rows(i));
        step(ddp, replicated, rows(i, rank, world));
      }
      for (auto& [name, value] : fsdp.state_dict(-1))
        ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6))
            << name << " world " << world;
      for (const auto& item : other->named_parameters())
        ASSERT_TRUE(at::allclose(item.value(), plain->named_parameters()[item.key()], 1e-5, 1e-6))
            << item.key();
    });
  }
}

TEST(FsdpStrategies, NoneAndHybridEqualThePlainModel) {
  for (const auto strategy : {ShardingStrategy::no_shard, ShardingStrategy::hybrid_shard}) {
    run_ranks(4, [&](ProcessGroup group, int rank) {
      auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
      auto options = every_leaf();
      options.sharding_strategy = strategy;
      options.shard_group_size = strategy == ShardingStrategy::hybrid_shard ? 2 : 0;
      FullyShardedDataParallel fsdp(net, group, options);
      auto make = [](auto parameters) {
        return default_optimizers().factory(
            "AdamW", {{"lr", 0.02}})({torch::optim::OptimizerParamGroup(parameters)});
      };
      auto optimizer = make(fsdp.parameters()), reference = make(plain->parameters());
      for (int i = 0; i < 4; ++i) {
        step(fsdp, *optimizer, rows(i, rank, 4));
        const double norm = fsdp.clip_grad_norm_(INFINITY);
        double expected = 0;
        reference->zero_grad();
        loss_of(plain(rows(i))).backward();
        for (const auto& p : plain->parameters())
          expected += p.grad().square().sum().item<double>();
        reference->step();
        EXPECT_NEAR(norm, std::sqrt(expected), 1e-5);
      }
      for (auto& [name, value] : fsdp.state_dict(-1))
        ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
      const auto state = fsdp.optim_state_dict(*optimizer, -1);
      const auto expected = state_dict(*reference, named_parameters(*plain));
      for (const auto& [name, entry] : expected.state)
        for (const auto& [key, tensor] : entry.tensors)
          ASSERT_TRUE(at::allclose(state.state.at(name).tensors.at(key), tensor, 1e-4, 1e-7))
              << name << " " << key;
      int64_t held = 0;
      for (const auto& p : plain->parameters()) held += p.numel() * 4;
      if (strategy == ShardingStrategy::no_shard) {
        EXPECT_EQ(fsdp.memory().parameters, held);
        EXPECT_EQ(fsdp.stats().gathers_forward, 0u);
      } else {
        EXPECT_LE(fsdp.memory().parameters, held / 2 + 4 * 7);
      }
    });
  }
}

TEST(FsdpClip, EqualsThePlainModelForEveryNorm) {
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (int world = 1; world <= 4; ++world) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(1), plain = seeded<Uneven>(1);
        FullyShardedDataParallel fsdp(net, group, every_leaf());
        EXPECT_EQ(fsdp.clip_grad_norm_(0.1, p), 0);  // no gradients: a warning
        loss_of(fsdp(rows(0, rank, world))).backward();
        loss_of(plain(rows(0))).backward();
        const double norm = fsdp.clip_grad_norm_(0.05, p),
                     expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05, p);
        EXPECT_NEAR(norm, expected, 1e-5 * std::max(1.0, expected));
        torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
        optimizer.step();
        reference.step();
        for (auto& [name, value] : fsdp.state_dict(-1))
          ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
        EXPECT_THAT(thrown_by([&] { fsdp.clip_grad_norm_(-1); }), HasSubstr("max_norm is -1"));
        EXPECT_THAT(thrown_by([&] { fsdp.clip_grad_norm_(1, 0); }), HasSubstr("norm_type is 0"));
      });
    }
  }
}

}  // namespace
