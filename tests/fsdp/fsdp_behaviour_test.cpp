#include "fsdp/models.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/torch_compat.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Options = FullyShardedDataParallelOptions;

at::Tensor rows(int step, int rank = 0, int world = 1) {
  return at::randn({12, 3}, at::make_generator<at::CPUGeneratorImpl>(100 + step)).narrow(0, 12 / world * rank, 12 / world);
}
at::Tensor loss_of(const at::Tensor& y) { return (y - 0.5).square().mean(); }

struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int blocks = 5) {
    for (int i = 0; i < blocks; ++i) list->push_back(torch::nn::Linear(3, 3));
    register_module("list", list);
    head = register_module("head", torch::nn::Linear(3, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& block : *list) x = torch::tanh(block->as<torch::nn::Linear>()->forward(x));
    return head(x);
  }
  torch::nn::ModuleList list;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Chain);

template <class Optimizer, class Net>
void step(Net& fsdp, Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  loss_of(fsdp(x)).backward();
  optimizer.step();
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(FsdpCounts, GathersAndReductionsOfAStep) {
  for (const auto prefetch : {BackwardPrefetch::none, BackwardPrefetch::pre, BackwardPrefetch::post}) {
    for (int world = 2; world <= 4; ++world) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Chain>(1);
        auto options = every_leaf();
        options.backward_prefetch = prefetch;
        options.forward_prefetch = prefetch == BackwardPrefetch::pre;
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
          EXPECT_EQ(group.stats().all_gather.calls, fsdp.stats().gathers_forward + fsdp.stats().gathers_backward);
          EXPECT_EQ(group.stats().reduce_scatter.calls, 6u);
          EXPECT_EQ(group.stats().all_reduce.calls, 0u);
          EXPECT_LE(fsdp.stats().peak_gathered_bytes, 2 * 12 * 4);
          EXPECT_EQ(fsdp.stats().gathered_bytes, 0);
          if (prefetch == BackwardPrefetch::pre) {
            EXPECT_GE(fsdp.stats().prefetches, 6u);
          }
        }
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

TEST(FsdpCounts, ABudgetKeepsWhatIsUsedSoonest) {
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
      // Six units of which four stay: by Belady's rule two are fetched again, but backward has no use for the first one's weight.
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
    for (auto p : fsdp.parameters()) p.mul_(2);  // seen
    EXPECT_FALSE(at::equal(fsdp(rows(0)), first));
    EXPECT_EQ(fsdp.stats().gathers_forward, 6u);
  });
}

TEST(FsdpCounts, FrozenParametersAreNeitherReducedNorGivenGradients) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    for (auto* each : {&net, &plain}) {
      for (int i = 1; i < 4; ++i) {
        for (auto p : (*each)->list[i]->parameters()) p.requires_grad_(false);
      }
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
    for (auto& [name, value] : fsdp.state_dict(-1)) ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
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
        for (auto& [name, value] : fsdp.state_dict(-1)) ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name << " world " << world;
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
    for (auto& [name, value] : fsdp.state_dict(-1)) ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
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
      const auto block = [this](torch::Tensor h) { return torch::tanh(torch::dropout(shared(torch::tanh(h)), 0.3, true)); };
      const auto run = [&](torch::Tensor h) { return checkpointed ? tessera::checkpoint(block, h) : block(h); };
      return last(run(run(first(x))));
    }
    bool checkpointed;
    torch::nn::Linear first{nullptr}, shared{nullptr}, last{nullptr};
  };
  // Dropout draws from the process's generator, which threads would share: one rank, then several without dropout's equality.
  torch::manual_seed(3);
  auto plain = std::make_shared<CheckpointedImpl>(false);
  auto checkpointed = std::make_shared<CheckpointedImpl>(true);
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < plain->parameters().size(); ++i) checkpointed->parameters()[i].copy_(plain->parameters()[i]);
  }
  torch::manual_seed(5);
  loss_of(plain->forward(rows(0))).backward();
  torch::manual_seed(5);
  loss_of(checkpointed->forward(rows(0))).backward();
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    ASSERT_TRUE(at::allclose(plain->parameters()[i].grad(), checkpointed->parameters()[i].grad(), 1e-5, 1e-6)) << i;
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
        const auto block = [linear = module->as<torch::nn::Linear>()](torch::Tensor h) { return torch::tanh(linear->forward(h)); };
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
      auto plain = seeded<CheckpointChain>(1, false), net = seeded<CheckpointChain>(1, true), other = seeded<CheckpointChain>(1, true);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      DistributedDataParallel ddp(other, group, {.find_unused_parameters = false, .static_graph = true});
      torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1), replicated(other->parameters(), 0.1);
      for (int i = 0; i < 4; ++i) {
        step(fsdp, optimizer, rows(i, rank, world));
        step(plain, reference, rows(i));
        step(ddp, replicated, rows(i, rank, world));
      }
      for (auto& [name, value] : fsdp.state_dict(-1)) ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name << " world " << world;
      for (const auto& item : other->named_parameters()) ASSERT_TRUE(at::allclose(item.value(), plain->named_parameters()[item.key()], 1e-5, 1e-6)) << item.key();
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
      auto make = [](auto parameters) { return default_optimizers().factory("AdamW", {{"lr", 0.02}})({torch::optim::OptimizerParamGroup(parameters)}); };
      auto optimizer = make(fsdp.parameters()), reference = make(plain->parameters());
      for (int i = 0; i < 4; ++i) {
        step(fsdp, *optimizer, rows(i, rank, 4));
        const double norm = fsdp.grad_norm();
        double expected = 0;
        reference->zero_grad();
        loss_of(plain(rows(i))).backward();
        for (const auto& p : plain->parameters()) expected += p.grad().square().sum().item<double>();
        reference->step();
        EXPECT_NEAR(norm, std::sqrt(expected), 1e-5);
      }
      for (auto& [name, value] : fsdp.state_dict(-1)) ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
      const auto state = fsdp.optim_state_dict(*optimizer, -1);
      const auto expected = state_dict(*reference, named_parameters(*plain));
      for (const auto& [name, entry] : expected.state) {
        for (const auto& [key, tensor] : entry.tensors) ASSERT_TRUE(at::allclose(state.state.at(name).tensors.at(key), tensor, 1e-4, 1e-7)) << name << " " << key;
      }
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
        const double norm = fsdp.clip_grad_norm_(0.05, p), expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.05, p);
        EXPECT_NEAR(norm, expected, 1e-5 * std::max(1.0, expected));
        torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
        optimizer.step();
        reference.step();
        for (auto& [name, value] : fsdp.state_dict(-1)) ASSERT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-5, 1e-6)) << name;
        EXPECT_THAT(error_of([&] { fsdp.clip_grad_norm_(-1); }), HasSubstr("max_norm is -1"));
        EXPECT_THAT(error_of([&] { fsdp.clip_grad_norm_(1, 0); }), HasSubstr("norm_type is 0"));
      });
    }
  }
}

TEST(FsdpUnits, PoliciesTiedAndIgnoredParameters) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      a = register_module("a", torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3)));
      b = register_module("b", torch::nn::Linear(3, 3));
      b->weight = b->register_parameter("again", a[0]->as<torch::nn::Linear>()->weight);
    }
    torch::nn::Sequential a{nullptr};
    torch::nn::Linear b{nullptr};
  };
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto names = [&](Options options) {
      auto net = std::make_shared<TiedImpl>();
      FullyShardedDataParallel fsdp(net, group, options);
      std::vector<std::string> result;
      for (const auto& unit : fsdp.units()) {
        std::string text = unit.name + ":";
        for (const auto& name : unit.parameters) text += " " + name;
        result.push_back(text);
      }
      EXPECT_THAT(fsdp.table(), AllOf(HasSubstr("(root)"), HasSubstr("gathered bytes")));
      return result;
    };
    auto options = every_leaf();
    EXPECT_THAT(names(options), ElementsAre(": a.0.weight", "a.0: a.0.bias", "a.1: a.1.weight a.1.bias", "b: b.weight b.bias"));
    options.wrap_policy = wrap_by_name({"a", "a.1"});
    options.ignored_parameters = {"b.bias"};
    EXPECT_THAT(names(options), ElementsAre(": a.0.weight b.weight", "a: a.0.bias", "a.1: a.1.weight a.1.bias"));
    options.ignored_parameters = {};
    options.ignored_modules = {"b"};
    EXPECT_THAT(names(options), ElementsAre(":", "a: a.0.weight a.0.bias", "a.1: a.1.weight a.1.bias"));
    options.ignored_modules = {};
    options.wrap_policy = wrap_by_size(10);
    EXPECT_THAT(names(options), ElementsAre(": a.0.weight", "a.0: a.0.bias", "a.1: a.1.weight a.1.bias", "b: b.weight b.bias"));
    options.wrap_policy = wrap_by_type<torch::nn::SequentialImpl>();
    EXPECT_THAT(names(options), ElementsAre(": a.0.weight b.weight b.bias", "a: a.0.bias a.1.weight a.1.bias"));
    options.wrap_policy = [](torch::nn::Module&, const std::string& name, int64_t) { return name == "b"; };
    EXPECT_THAT(names(options), ElementsAre(": a.0.weight a.0.bias a.1.weight a.1.bias", "b: b.weight b.bias"));
    options.ignored_modules = {"c"};
    EXPECT_THAT(error_of([&] { names(options); }), HasSubstr("ignored_modules names c"));
  });
  const auto policies = default_wrap_policies();
  EXPECT_THAT(error_of([&] { policies.make("size_base"); }), HasSubstr("did you mean \"size_based\""));
  EXPECT_THAT(error_of([&] { policies.make("size_based", {{"min_nume", int64_t{3}}}); }), HasSubstr("did you mean \"min_numel\""));
  EXPECT_THAT(error_of([&] { policies.make("size_based", {{"min_numel", int64_t{0}}}); }), HasSubstr("min_numel is 0"));
  EXPECT_TRUE(policies.make("name_based", {{"patterns", std::string("blocks.*,**.mlp")}}));
}

TEST(FsdpErrors, OutsideARunningModelAParameterRaisesAndNamesItself) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const auto reads = [&] { return error_of([&] { (net->head->weight + 1).sum(); }); };
    EXPECT_THAT(reads(), AllOf(HasSubstr("head.weight"), HasSubstr("unit head"), HasSubstr("aten::add"), HasSubstr("rank " + std::to_string(rank)), HasSubstr("summon_full_params")));
    EXPECT_THAT(error_of([&] { at::cat({net->head->bias, net->list[2]->named_parameters()["bias"]}); }), HasSubstr("aten::cat takes parameter head.bias"));
    auto out = fsdp(rows(0, rank, 2));
    EXPECT_THAT(reads(), HasSubstr("head.weight"));
    EXPECT_THAT(error_of([&] { net->forward(rows(0)); }), HasSubstr("list.0."));
    loss_of(out).backward();
    EXPECT_THAT(reads(), HasSubstr("head.weight"));
    {
      auto whole = fsdp.summon_full_params();
      EXPECT_EQ(reads(), "no error");
    }
    EXPECT_THAT(reads(), HasSubstr("head.weight"));
  });
}

TEST(FsdpForward, OtherMethodsOfTheModule) {
  run_ranks(2, [&](ProcessGroup group, int) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const auto y = fsdp.call([](Chain& chain) { return chain->head(torch::ones({1, 3})); });
    EXPECT_TRUE(at::equal(y, plain->head(torch::ones({1, 3}))));
  });
}

TEST(FsdpErrors, WritesToGatheredParametersAreRefused) {
  struct WriterImpl : torch::nn::Module {
    WriterImpl() { linear = register_module("linear", torch::nn::Linear(3, 2)); }
    torch::Tensor forward(torch::Tensor x) {
      torch::NoGradGuard no_grad;
      linear->weight.clamp_(-1, 1);
      return linear(x);
    }
    torch::nn::Linear linear{nullptr};
  };
  run_ranks(2, [&](ProcessGroup group, int) {
    FullyShardedDataParallel fsdp(std::make_shared<WriterImpl>(), group, every_leaf());
    EXPECT_THAT(error_of([&] { fsdp(rows(0)); }), AllOf(HasSubstr("clamp_ writes to parameter linear.weight"), HasSubstr("would be lost")));
  });
}

TEST(FsdpErrors, RanksThatTakeDifferentBranchesAreTold) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Skipping>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    net->step = rank;
    loss_of(fsdp(rows(0, rank, 2))).backward();
  });
  for (const auto& error : errors) EXPECT_THAT(message_of(error), AllOf(HasSubstr("rank 0"), HasSubstr("rank 1"), HasSubstr("unit optional"), HasSubstr("unit last")));
}

TEST(FsdpErrors, GradientsOfOtherParametersOnARankAreTold) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Skipping>(1);
    FullyShardedDataParallel fsdp(net, group, {});
    net->step = rank;
    loss_of(fsdp(rows(0, rank, 2))).backward();
  });
  for (const auto& error : errors) EXPECT_THAT(message_of(error), AllOf(HasSubstr("gradients of unit (root)"), HasSubstr("4 of 6 parameters used"), HasSubstr("6 of 6")));
}

TEST(FsdpErrors, BadOptionsAndModels) {
  run_ranks(3, [&](ProcessGroup group, int rank) {
    const auto with = [&](auto change) {
      auto options = every_leaf();
      change(options);
      return error_of([&] { FullyShardedDataParallel(seeded<Chain>(1), group, options); });
    };
    EXPECT_THAT(with([](Options& o) { o.resident_bytes = -1; }), HasSubstr("resident_bytes is -1"));
    EXPECT_THAT(with([](Options& o) { o.sharding_strategy = ShardingStrategy::hybrid_shard, o.shard_group_size = 2; }), HasSubstr("shard_group_size is 2"));
    EXPECT_THAT(with([](Options& o) { o.mixed_precision.param_dtype = at::kInt; }), HasSubstr("mixed_precision.param_dtype is Int"));
    EXPECT_THAT(with([](Options& o) { o.ignored_parameters = {"head.weigth"}; }), HasSubstr("did you mean \"head.weight\""));
    EXPECT_THAT(error_of([&] { FullyShardedDataParallel(seeded<Chain>(1, rank == 1 ? 4 : 5), group, every_leaf()); }), HasSubstr("the ranks differ"));
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    torch::optim::LBFGS lbfgs(fsdp.parameters());
    EXPECT_THAT(error_of([&] { fsdp.check_optimizer(lbfgs); }), HasSubstr("element-wise"));
    EXPECT_THAT(error_of([&] { fsdp.optim_state_dict(lbfgs); }), HasSubstr("element-wise"));
    torch::optim::SGD mistaken(net->parameters(), 0.1);
    EXPECT_THAT(error_of([&] { fsdp.optim_state_dict(mistaken); }), HasSubstr("none of fsdp.parameters()"));
  });
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    net->to(at::kDouble);
    fsdp(rows(0).to(at::kDouble));
  });
  for (const auto& error : errors) EXPECT_FALSE(message_of(error).empty());
}

TEST(FsdpFullParams, ReadWriteSubTreeAndRankZero) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      {
        auto whole = fsdp.summon_full_params();
        for (const auto& item : net->named_parameters()) ASSERT_TRUE(at::equal(item.value(), plain->named_parameters()[item.key()])) << item.key();
        torch::NoGradGuard no_grad;
        net->head->weight.fill_(2);
        net->list[0]->named_parameters()["bias"].set_data(at::ones({3}));
      }
      {
        auto whole = fsdp.summon_full_params("head", false);
        torch::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(net->head->weight, at::full({2, 3}, 2.0)));
        if (world > 1) {
          net->head->weight.fill_(7);  // not written back
          EXPECT_THAT(error_of([&] { net->list[0]->named_parameters()["bias"].sum(); }), HasSubstr("list.0.bias"));
        }
        EXPECT_THAT(error_of([&] { fsdp(rows(0)); }), HasSubstr("inside summon_full_params"));
      }
      {
        auto whole = fsdp.summon_full_params("", false, true);
        if (rank == 0) EXPECT_TRUE(at::equal(net->head->weight, at::full({2, 3}, 2.0)));
        else EXPECT_THAT(error_of([&] { net->head->weight.sum(); }), HasSubstr("head.weight"));
      }
      std::map<std::string, at::Tensor> state;
      for (auto& [name, value] : fsdp.state_dict(-1)) state[name] = value;
      EXPECT_TRUE(at::equal(state["list.0.bias"], at::ones({3})));
      EXPECT_TRUE(at::equal(state["head.weight"], at::full({2, 3}, 2.0)));
      EXPECT_THAT(error_of([&] { auto whole = fsdp.summon_full_params("nowhere"); }), HasSubstr("under \"nowhere\""));
      EXPECT_THAT(error_of([&] { auto whole = fsdp.summon_full_params("", true, true); }), HasSubstr("rank0_only"));
    });
  }
}

TEST(FsdpDetection, RecordFunctionDoesTheSame) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Twice>(1), other = seeded<Twice>(1);
    auto options = every_leaf();
    FullyShardedDataParallel fsdp(net, group, options);
    options.detection = ParameterDetection::record_function;
    FullyShardedDataParallel recorded(other, group, options);
    torch::optim::SGD a(fsdp.parameters(), 0.1), b(recorded.parameters(), 0.1);
    for (int i = 0; i < 3; ++i) {
      step(fsdp, a, rows(i, rank, 2));
      step(recorded, b, rows(i, rank, 2));
    }
    const auto x = fsdp.state_dict(-1), y = recorded.state_dict(-1);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_TRUE(at::equal(x[i].second, y[i].second)) << x[i].first;
    EXPECT_EQ(fsdp.stats().gathers_forward, recorded.stats().gathers_forward);
  });
}

TEST(FsdpMixedPrecision, ComputesInBfloat16AndKeepsFloat32) {
  for (int world = 1; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
      auto options = every_leaf();
      options.mixed_precision.param_dtype = at::kBFloat16;
      options.mixed_precision.reduce_dtype = at::kFloat;
      FullyShardedDataParallel fsdp(net, group, options);
      torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
      for (int i = 0; i < 5; ++i) {
        optimizer.zero_grad();
        auto out = fsdp(rows(i, rank, world));
        EXPECT_EQ(out.scalar_type(), at::kBFloat16);
        loss_of(out.to(at::kFloat)).backward();
        optimizer.step();
        step(plain, reference, rows(i));
      }
      for (const auto& p : fsdp.parameters()) EXPECT_EQ(p.scalar_type(), at::kFloat);
      double moved = 0, off = 0;
      auto start = seeded<Chain>(1);
      for (auto& [name, value] : fsdp.state_dict(-1)) {
        EXPECT_EQ(value.scalar_type(), at::kFloat);
        moved += (plain->named_parameters()[name] - start->named_parameters()[name]).square().sum().item<double>();
        off += (plain->named_parameters()[name] - value).square().sum().item<double>();
      }
      EXPECT_LT(std::sqrt(off), 0.05 * std::sqrt(moved));
      {
        auto whole = fsdp.summon_full_params();
        EXPECT_EQ(net->head->weight.scalar_type(), at::kFloat);
      }
      step(fsdp, optimizer, rows(9, rank, world));
      for (const auto& p : fsdp.parameters()) {
        if (p.numel() > 0) EXPECT_TRUE(p.grad().defined());
      }
    });
  }
}

TEST(FsdpAutocast, KeepsNoCastCopies) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const compat::AutocastState on{{true, at::kBFloat16}, compat::AutocastState::current().cuda};
    for (int i = 0; i < 2; ++i) {
      at::Tensor a, b;
      {
        const compat::AutocastState::Scope scope(on);
        a = loss_of(fsdp(rows(i)).to(at::kFloat));
        b = loss_of(plain(rows(i)).to(at::kFloat));
      }
      at::autocast::clear_cache();
      EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
      EXPECT_TRUE(at::equal(a, b));
      a.backward();
      b.backward();
    }
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1);
    optimizer.step();
  });
}

}  // namespace
