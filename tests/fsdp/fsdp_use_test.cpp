#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Options = FullyShardedDataParallelOptions;

TEST(FsdpUnits, PoliciesTiedAndIgnoredParameters) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      a = register_module("a",
                          torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3)));
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
    EXPECT_THAT(names(options), ElementsAre(": a.0.weight", "a.0: a.0.bias",
                                            "a.1: a.1.weight a.1.bias", "b: b.weight b.bias"));
    options.wrap_policy = wrap_by_name({"a", "a.1"});
    options.ignored_states = {"b.bias"};
    EXPECT_THAT(names(options),
                ElementsAre(": a.0.weight b.weight", "a: a.0.bias", "a.1: a.1.weight a.1.bias"));
    options.ignored_states = {"b"};
    EXPECT_THAT(names(options),
                ElementsAre(":", "a: a.0.weight a.0.bias", "a.1: a.1.weight a.1.bias"));
    options.ignored_states = {};
    options.wrap_policy = wrap_by_size(10);
    EXPECT_THAT(names(options), ElementsAre(": a.0.weight", "a.0: a.0.bias",
                                            "a.1: a.1.weight a.1.bias", "b: b.weight b.bias"));
    options.wrap_policy = wrap_by_type<torch::nn::SequentialImpl>();
    EXPECT_THAT(names(options),
                ElementsAre(": a.0.weight b.weight b.bias", "a: a.0.bias a.1.weight a.1.bias"));
    options.wrap_policy = [](torch::nn::Module&, const std::string& name, int64_t) {
      return name == "b";
    };
    EXPECT_THAT(names(options),
                ElementsAre(": a.0.weight a.0.bias a.1.weight a.1.bias", "b: b.weight b.bias"));
    options.ignored_states = {"c"};
    EXPECT_THAT(thrown_by([&] { names(options); }), HasSubstr("ignored_states contains c"));
  });
  const auto policies = default_wrap_policies();
  EXPECT_THAT(thrown_by([&] { policies.make("size_base"); }),
              HasSubstr("did you mean \"size_based\""));
  EXPECT_THAT(thrown_by([&] {
                policies.make("size_based", {{"min_nume", int64_t{3}}});
              }),
              HasSubstr("did you mean \"min_numel\""));
  EXPECT_THAT(thrown_by([&] {
                policies.make("size_based", {{"min_numel", int64_t{0}}});
              }),
              HasSubstr("min_numel: 0; expected a whole number >= 1"));
  const auto by_name = policies.make(
      "name_based", {{"patterns", std::vector<std::string>{"blocks.*", "**.mlp", "h?"}}});
  torch::nn::Linear any(1, 1);
  for (const char* name : {"blocks.3", "blocks.3.mlp", "a.b.mlp", "h1"})
    EXPECT_TRUE(by_name(*any, name, 0)) << name;
  for (const char* name : {"blocks", "blocks.3.ln", "mlp", "h", "h12", "xblocks.3"})
    EXPECT_FALSE(by_name(*any, name, 0)) << name;
}

TEST(FsdpErrors, AUseOutsideOfTheRunningModelIsAnErrorWithTheName) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const auto reads = [&] { return thrown_by([&] { (net->head->weight + 1).sum(); }); };
    EXPECT_THAT(reads(),
                AllOf(HasSubstr("head.weight"), HasSubstr("unit head"), HasSubstr("aten::add"),
                      HasSubstr("rank " + std::to_string(rank)), HasSubstr("summon_full_params")));
    EXPECT_THAT(thrown_by([&] {
                  at::cat({net->head->bias, net->list[2]->named_parameters()["bias"]});
                }),
                HasSubstr("aten::cat uses parameter head.bias"));
    auto out = fsdp(rows(0, rank, 2));
    EXPECT_THAT(reads(), HasSubstr("head.weight"));
    EXPECT_THAT(thrown_by([&] { net->forward(rows(0)); }), HasSubstr("list.0."));
    loss_of(out).backward();
    EXPECT_THAT(reads(), HasSubstr("head.weight"));
    {
      auto whole = fsdp.summon_full_params();
      EXPECT_EQ(reads(), "no error");
    }
    EXPECT_THAT(reads(), HasSubstr("head.weight"));
    auto* storage = net->head->weight.storage().unsafeGetStorageImpl();
    EXPECT_EQ(compat::unchecked_data_ptr(storage).get(), nullptr) << "nor do raw pointers";
  });
}

TEST(FsdpForward, CallRunsOtherMethodsOfTheModule) {
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
    EXPECT_THAT(
        thrown_by([&] { fsdp(rows(0)); }),
        AllOf(HasSubstr("clamp_ writes to parameter linear.weight"), HasSubstr("would be lost")));
  });
}

TEST(FsdpErrors, InvalidOptionsAndModelsAreRefused) {
  run_ranks(3, [&](ProcessGroup group, int rank) {
    const auto with = [&](auto change) {
      auto options = every_leaf();
      change(options);
      return thrown_by([&] { FullyShardedDataParallel(seeded<Chain>(1), group, options); });
    };
    EXPECT_THAT(with([](Options& o) { o.resident_bytes = -1; }), HasSubstr("resident_bytes: -1;"));
    EXPECT_THAT(with([](Options& o) {
                  o.sharding_strategy = ShardingStrategy::hybrid_shard, o.shard_group_size = 2;
                }),
                HasSubstr("shard_group_size is 2"));
    EXPECT_THAT(with([](Options& o) { o.mixed_precision.param_dtype = at::kInt; }),
                HasSubstr("mixed_precision.param_dtype is Int"));
    EXPECT_THAT(with([](Options& o) { o.ignored_states = {"head.weigth"}; }),
                HasSubstr("did you mean \"head.weight\""));
    EXPECT_THAT(thrown_by([&] {
                  FullyShardedDataParallel(seeded<Chain>(1, rank == 1 ? 4 : 5), group,
                                           every_leaf());
                }),
                HasSubstr("the ranks differ"));
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    torch::optim::LBFGS lbfgs(fsdp.parameters());
    EXPECT_THAT(thrown_by([&] { fsdp.check_optimizer(lbfgs); }), HasSubstr("element-wise"));
    EXPECT_THAT(thrown_by([&] { fsdp.optim_state_dict(lbfgs); }), HasSubstr("element-wise"));
    torch::optim::SGD mistaken(net->parameters(), 0.1);
    EXPECT_THAT(thrown_by([&] { fsdp.optim_state_dict(mistaken); }),
                HasSubstr("not in fsdp.parameters()"));
  });
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    net->to(at::kDouble);
    fsdp(rows(0).to(at::kDouble));
  });
  for (const auto& error : errors) EXPECT_THAT(message_of(error), HasSubstr("list.0.weight"));
  auto net = seeded<Chain>(1);
  FullyShardedDataParallel alone(net, ProcessGroup(),
                                 every_leaf());  // one rank: to() works because nothing is sharded
  net->to(at::kDouble);
  EXPECT_THAT(thrown_by([&] { alone(rows(0).to(at::kDouble)); }),
              AllOf(HasSubstr("list.0.weight"), HasSubstr("other storage")));
}

TEST(FsdpFullParams, ReadWriteSubTreeAndRankZero) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      {
        auto whole = fsdp.summon_full_params();
        for (const auto& item : net->named_parameters())
          ASSERT_TRUE(at::equal(item.value(), plain->named_parameters()[item.key()])) << item.key();
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
          EXPECT_THAT(thrown_by([&] { net->list[0]->named_parameters()["bias"].sum(); }),
                      HasSubstr("list.0.bias"));
        }
        EXPECT_THAT(thrown_by([&] { fsdp(rows(0)); }), HasSubstr("inside summon_full_params"));
      }
      {
        auto whole = fsdp.summon_full_params("", false, true);
        if (rank == 0) EXPECT_TRUE(at::equal(net->head->weight, at::full({2, 3}, 2.0)));
        else EXPECT_THAT(thrown_by([&] { net->head->weight.sum(); }), HasSubstr("head.weight"));
      }
      std::map<std::string, at::Tensor> state;
      for (auto& [name, value] : fsdp.state_dict(-1)) state[name] = value;
      EXPECT_TRUE(at::equal(state["list.0.bias"], at::ones({3})));
      EXPECT_TRUE(at::equal(state["head.weight"], at::full({2, 3}, 2.0)));
      EXPECT_THAT(thrown_by([&] { auto whole = fsdp.summon_full_params("nowhere"); }),
                  HasSubstr("under \"nowhere\""));
      EXPECT_THAT(thrown_by([&] { auto whole = fsdp.summon_full_params("", true, true); }),
                  HasSubstr("rank0_only"));
    });
  }
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
        moved += (plain->named_parameters()[name] - start->named_parameters()[name])
                     .square()
                     .sum()
                     .item<double>();
        off += (plain->named_parameters()[name] - value).square().sum().item<double>();
      }
      EXPECT_LT(std::sqrt(off), 0.05 * std::sqrt(moved));
      {
        auto whole = fsdp.summon_full_params();
        EXPECT_EQ(net->head->weight.scalar_type(), at::kFloat);
      }
      FullyShardedDataParallel one_unit(seeded<Chain>(1), group,
                                        {.mixed_precision = options.mixed_precision});
      loss_of(one_unit(rows(0)).to(at::kFloat)).backward();
      EXPECT_EQ(one_unit.stats().peak_gathered_bytes, 68 * 2);
      EXPECT_EQ(one_unit.stats().peak_gradient_bytes, 68 * 4);
      step(fsdp, optimizer, rows(9, rank, world));
      for (const auto& p : fsdp.parameters())
        if (p.numel() > 0) EXPECT_TRUE(p.grad().defined());
    });
  }
}

TEST(FsdpAutocast, KeepsNoConvertedCopies) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const compat::AutocastState on{{true, at::kBFloat16}, compat::AutocastState::current().cuda};
    for (int i = 0; i < 2; ++i) {
      at::Tensor a, b;
      {
        const compat::AutocastState::Scope scope(on);
        a = loss_of(fsdp.call([&](auto& module) {
                          EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
                          return module->forward(rows(i));
                        })
                        .to(at::kFloat));
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
