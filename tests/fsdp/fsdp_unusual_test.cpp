// Unusual models and training loops: each works, or ends in an error with the reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

FullyShardedDataParallelOptions leaves_in_bf16() {
  auto options = every_leaf();
  options.mixed_precision.param_dtype = at::kBFloat16;
  return options;
}

void copy_parameters(const torch::nn::Module& from, torch::nn::Module& to) {
  at::NoGradGuard no_grad;
  const auto source = from.parameters();
  auto target = to.parameters();
  for (size_t i = 0; i < source.size(); ++i) target[i].copy_(source[i]);
}

/// The gradients of the shards of a Chain, taken from the gradients of a plain Chain.
template <class Net>
void expect_gradients_of(const Net& plain, FullyShardedDataParallel<Net>& fsdp,
                         const std::string& when) {
  for (const auto& slice : fsdp.shards()) {
    const auto whole = plain->named_parameters()[slice.parameter].grad().reshape({-1}).narrow(
        0, slice.begin, slice.numel);
    if (slice.numel == 0) continue;
    ASSERT_TRUE(slice.tensor.grad().defined()) << slice.parameter << " " << when;
    EXPECT_TRUE(at::allclose(slice.tensor.grad().reshape({-1}), whole, 1e-5, 1e-7))
        << slice.parameter << " " << when;
  }
}

TEST(FsdpUnusual, ForwardMayTakeItsTensorsByAnyReference) {
  struct RefersImpl : torch::nn::Module {
    RefersImpl() { linear = register_module("linear", torch::nn::Linear(3, 3)); }
    torch::Tensor forward(torch::Tensor& a, const torch::Tensor& b, torch::Tensor&& c) {
      EXPECT_EQ(a.scalar_type(), c.scalar_type());
      auto y = linear(a + b + c);
      a = y;
      return y;
    }
    torch::nn::Linear linear{nullptr};
  };
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto a = rows(0, rank, 2);
    FullyShardedDataParallel fsdp(std::make_shared<RefersImpl>(), group, every_leaf());
    const auto y = fsdp(a, rows(1, rank, 2), rows(2, rank, 2));
    EXPECT_TRUE(a.is_same(y)) << "nothing is cast, so it is the caller's own";
    FullyShardedDataParallel half(std::make_shared<RefersImpl>(), group, leaves_in_bf16());
    auto kept = rows(0, rank, 2);
    EXPECT_EQ(half(kept, rows(1, rank, 2), rows(2, rank, 2)).scalar_type(), at::kBFloat16);
    EXPECT_EQ(kept.scalar_type(), at::kFloat);
  });
}

TEST(FsdpUnusual, TensorsInContainersAreCast) {
  using Pair = std::pair<torch::Tensor, int>;
  struct ManyImpl : torch::nn::Module {
    ManyImpl() {
      lstm =
          register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(3, 4).batch_first(true)));
    }
    torch::Tensor forward(torch::Tensor x, std::tuple<torch::Tensor, torch::Tensor> state,
                          const std::vector<torch::Tensor>& list,
                          std::optional<torch::Tensor> maybe,
                          std::map<std::string, std::vector<torch::Tensor>> named, const Pair& pair,
                          const std::string& text, torch::Tensor tokens) {
      EXPECT_EQ(text, "as it is");
      EXPECT_EQ(tokens.scalar_type(), at::kLong);
      EXPECT_FALSE(list[1].defined());
      for (const auto& each : {list[0], *maybe, named.at("a")[0], pair.first})
        EXPECT_EQ(each.scalar_type(), at::kBFloat16);
      return std::get<0>(lstm(x, state));
    }
    torch::nn::LSTM lstm{nullptr};
  };
  run_ranks(2, [&](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(std::make_shared<ManyImpl>(), group, leaves_in_bf16());
    const auto x = rows(0, rank, 2).unsqueeze(1);
    const auto zeros = at::zeros({1, x.size(0), 4});
    const std::map<std::string, std::vector<torch::Tensor>> named{{"a", {at::ones({2})}}};
    const auto y = fsdp(x, std::make_tuple(zeros, zeros.clone()),
                        std::vector<torch::Tensor>{at::ones({1}), {}},
                        std::optional<torch::Tensor>(at::ones({1})), named, Pair(at::ones({1}), 3),
                        "as it is", at::ones({2}, at::kLong));
    y.sum().backward();
    EXPECT_EQ(named.at("a")[0].scalar_type(), at::kFloat);
  });
}

/// Its backward throws on request.
struct Trap : torch::autograd::Function<Trap> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x,
                               bool throws) {
    context->saved_data["throws"] = throws;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (context->saved_data["throws"].toBool()) throw std::runtime_error("sprung");
    return {gradients[0], torch::Tensor()};
  }
};

struct TrappedImpl : torch::nn::Module {
  TrappedImpl() {
    first = register_module("first", torch::nn::Linear(3, 4));
    middle = register_module("middle", torch::nn::Linear(4, 4));
    last = register_module("last", torch::nn::Linear(4, 2));
  }
  torch::Tensor forward(torch::Tensor x, bool throws) {
    return last(middle(Trap::apply(torch::tanh(first(x)), throws)));
  }
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};
TORCH_MODULE(Trapped);

TEST(FsdpUnusual, ABackwardThatThrewDoesNotAffectTheNext) {
  const Trapped start;
  for (const int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      Trapped plain, net;
      copy_parameters(*start, *plain);
      copy_parameters(*start, *net);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      for (int i = 0; i < 3; ++i) {
        EXPECT_THROW((fsdp(rows(9, rank, world) * 100, true).square().sum().backward()),
                     std::runtime_error);
        fsdp.zero_grad();
        plain->zero_grad();
        loss_of(fsdp(rows(i, rank, world), false)).backward();
        loss_of(plain(rows(i), false)).backward();
        expect_gradients_of(plain, fsdp, "world " + std::to_string(world));
      }
    });
  }
}

TEST(FsdpUnusual, AUseAfterTheWrapperIsDestroyedNamesTheParameter) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    Chain net(2);
    at::Tensor loss;
    {
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      loss = loss_of(fsdp(rows(0, rank, 2)));
    }
    const auto expected =
        AllOf(HasSubstr("a parameter of unit list.0 was used after the wrapper was destroyed"),
              HasSubstr("as long as its module"));
    EXPECT_THAT(thrown_by([&] { net(rows(0)); }), expected);
    EXPECT_THAT(thrown_by([&] { loss.backward(); }),
                HasSubstr("was used after the wrapper was destroyed"));
    EXPECT_THAT(thrown_by([&] { FullyShardedDataParallel again(net, group, every_leaf()); }),
                HasSubstr("was used after the wrapper was destroyed"));
  });
}

TEST(FsdpUnusual, AFirstForwardInInferenceModeDoesNotBreakTraining) {
  const Chain start(3);
  for (const auto backend : {Backend::Auto, Backend::TCP}) {
    for (const bool half : {false, true}) {
      run_ranks(2,
                [&](ProcessGroup group, int rank) {
                  Chain plain(3), net(3);
                  copy_parameters(*start, *plain);
                  copy_parameters(*start, *net);
                  auto options = half ? leaves_in_bf16() : every_leaf();
                  options.mixed_precision.full_precision_in_eval = half;
                  FullyShardedDataParallel fsdp(net, group, options);
                  for (int i = 0; i < 2; ++i) {
                    {
                      const c10::InferenceMode inference;
                      fsdp(rows(0));
                      net->eval();
                      EXPECT_TRUE(at::allclose(fsdp(rows(0)), plain(rows(0)), 1e-5, 1e-6));
                      net->train();
                    }
                    fsdp.zero_grad();
                    plain->zero_grad();
                    loss_of(fsdp(rows(i, rank, 2)).to(at::kFloat)).backward();
                    loss_of(plain(rows(i))).backward();
                    if (!half) expect_gradients_of(plain, fsdp, "after inference");
                  }
                },
                {.backend = backend});
    }
  }
}

TEST(FsdpUnusual, GradientsFromBeforeTheWrapperAreDropped) {
  const Chain start(2);
  for (const int world : {1, 2}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      Chain plain(2), net(2);
      copy_parameters(*start, *plain);
      copy_parameters(*start, *net);
      (net(rows(7)) * 100).sum().backward();
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      loss_of(fsdp(rows(0, rank, world))).backward();
      loss_of(plain(rows(0))).backward();
      expect_gradients_of(plain, fsdp, "world " + std::to_string(world));
    });
  }
}

TEST(FsdpUnusual, AParameterThatForwardUnfreezesIsNamed) {
  struct ThawingImpl : ChainImpl {
    ThawingImpl() : ChainImpl(2) {}
    torch::Tensor forward(torch::Tensor x) {
      head->bias.set_requires_grad(true);
      return ChainImpl::forward(x);
    }
  };
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int) {
    auto net = std::make_shared<ThawingImpl>();
    net->head->bias.set_requires_grad(false);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    fsdp(rows(0));
  });
  expect_usage_errors(errors, "parameter head.bias requires a gradient since the beginning");
}

TEST(FsdpUnusual, ZeroGradDropsGradientsThatNoSyncHasKept) {
  const Chain start(2);
  for (const int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      Chain plain(2), net(2);
      copy_parameters(*start, *plain);
      copy_parameters(*start, *net);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      {
        const auto rejected = fsdp.no_sync();
        (fsdp(rows(7, rank, world)) * 100).sum().backward();
      }
      fsdp.zero_grad();
      EXPECT_EQ(fsdp.stats().gradient_bytes, 0);
      loss_of(fsdp(rows(0, rank, world))).backward();
      loss_of(plain(rows(0))).backward();
      expect_gradients_of(plain, fsdp, "world " + std::to_string(world));
      fsdp.zero_grad(false);
      for (const auto& shard : fsdp.parameters())
        if (shard.numel() > 0) EXPECT_EQ(shard.grad().abs().sum().item<float>(), 0);
    });
  }
}

struct PositionsImpl : torch::nn::Module {
  explicit PositionsImpl(int rank) {
    linear = register_module("linear", torch::nn::Linear(4, 2));
    ids = register_buffer("ids", torch::arange(4, at::kFloat).add(rank).expand({3, -1}));
  }
  torch::Tensor forward(torch::Tensor x) { return linear(x + ids); }
  torch::nn::Linear linear{nullptr};
  torch::Tensor ids;
};
TORCH_MODULE(Positions);

TEST(FsdpUnusual, ExpandedBuffersAreCopiedFromRankZero) {
  for (const int world : {2, 3}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      const auto expected = torch::arange(4, at::kFloat).expand({3, -1});
      Positions one(rank), other(rank);
      FullyShardedDataParallel fsdp(one, group, every_leaf());
      EXPECT_TRUE(at::equal(one->ids, expected)) << rank;
      fsdp(at::ones({3, 4})).sum().backward();
      DistributedDataParallel ddp(other, group);
      EXPECT_TRUE(at::equal(other->ids, expected)) << rank;
      ddp(at::ones({3, 4})).sum().backward();
      EXPECT_EQ(other->ids.stride(0), 0);
    });
  }
}

TEST(FsdpUnusual, BatchNormsComputeInTheDtypeOfTheirBuffers) {
  for (const int world : {1, 2}) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      torch::nn::Sequential net(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4),
                                torch::nn::Flatten(), torch::nn::Linear(64, 2),
                                torch::nn::BatchNorm1d(2));
      FullyShardedDataParallel fsdp(net, group, leaves_in_bf16());
      for (int i = 0; i < 3; ++i) {
        const auto y = fsdp(rgb_images(i, rank, world));
        EXPECT_EQ(y.scalar_type(), at::kBFloat16);
        y.to(at::kFloat).square().mean().backward();
      }
      const auto& norm = net[1]->as<torch::nn::BatchNorm2d>();
      EXPECT_EQ(norm->weight.scalar_type(), at::kFloat);
      EXPECT_EQ(norm->running_mean.scalar_type(), at::kFloat);
      EXPECT_GT(norm->running_mean.abs().sum().item<float>(), 0);
      for (const auto& [name, shard] : fsdp.named_parameters())
        if (shard.numel() > 0) EXPECT_TRUE(shard.grad().defined()) << name;
      auto both = leaves_in_bf16();
      both.mixed_precision.buffer_dtype = at::kBFloat16;
      torch::nn::Sequential small(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
      FullyShardedDataParallel half(small, group, both);
      half(rgb_images(0, rank, world)).sum().backward();
      EXPECT_EQ(small[1]->as<torch::nn::BatchNorm2d>()->weight.scalar_type(), at::kBFloat16);
    });
  }
}

/// An embedding whose forward writes its weight.
struct RenormedImpl : torch::nn::Module {
  RenormedImpl() {
    first = register_module("first", torch::nn::Linear(3, 3));
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).max_norm(0.5)));
  }
  torch::Tensor forward(torch::Tensor x, torch::Tensor tokens) { return first(x) + table(tokens); }
  torch::nn::Linear first{nullptr};
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Renormed);

TEST(FsdpUnusual, AForwardThatWritesAParameterIsAnErrorWhereRanksWouldDrift) {
  for (int world = 1; world <= 3; ++world) {
    for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                                ShardingStrategy::no_shard, ShardingStrategy::hybrid_shard}) {
      auto options = every_leaf();
      options.sharding_strategy = strategy;
      options.shard_group_size = 1;
      bool equal = false;
      const auto errors = run_ranks_catching(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Renormed>(1), plain = seeded<Renormed>(1);
        FullyShardedDataParallel fsdp(net, group, options);
        const auto x = at::ones({2, 3}), tokens = at::tensor({rank, 5 - rank});
        const auto expected = plain(x, tokens);
        equal = at::equal(fsdp(x, tokens), expected);
      });
      SCOPED_TRACE(std::to_string(static_cast<int>(strategy)) + ", world " + std::to_string(world));
      if (world > 1) {
        expect_usage_errors(errors, "parameter table.weight");
      } else {
        EXPECT_EQ(errors[0], nullptr) << message_of(errors[0]);
        EXPECT_TRUE(equal);
      }
    }
  }
}

}  // namespace
