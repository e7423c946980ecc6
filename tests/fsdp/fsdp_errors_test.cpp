#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/step/agreement.h"

// Wrong lines of user code: every rank gets an error that says what to do, and no rank waits.

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The convolution's weight as a plain tensor of its shape, from rank 0's shards.
at::Tensor conv_of(FullyShardedDataParallel<Mixed>& fsdp) {
  return fsdp.full_parameter("conv.weight", -1);
}

TEST(FsdpFullParams, WritesAReplacedParameterBackElementByElement) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int) {
      auto net = seeded<Mixed>(1);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      const auto strides = net->conv->weight.strides().vec();
      const auto values = at::arange(90.0, at::kFloat).view({5, 2, 3, 3});
      {
        auto whole = fsdp.summon_full_params();
        ASSERT_FALSE(net->conv->weight.is_contiguous());
        net->conv->weight.set_data(values.clone());
      }
      EXPECT_TRUE(at::equal(conv_of(fsdp), values)) << "world " << world;
      EXPECT_EQ(net->conv->weight.strides().vec(), strides);
      {
        auto whole = fsdp.summon_full_params();
        // A view of the same memory.
        net->conv->weight.set_data(net->conv->weight.detach().transpose(2, 3));
      }
      EXPECT_TRUE(at::equal(conv_of(fsdp), values.transpose(2, 3))) << "world " << world;
      loss_of(fsdp(images(0))).backward();
    });
  }
}

TEST(FsdpFullParams, ParametersMayExchangeTheirMemory) {
  run_ranks(2, [&](ProcessGroup group, int) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const auto first = [](Chain& chain) { return chain->list[0]->named_parameters()["weight"]; };
    const auto second = [](Chain& chain) { return chain->list[1]->named_parameters()["weight"]; };
    {
      auto whole = fsdp.summon_full_params();
      const auto a = first(net).detach(), b = second(net).detach();
      first(net).set_data(b);
      second(net).set_data(a);
    }
    EXPECT_TRUE(at::equal(fsdp.full_parameter("list.0.weight", -1), second(plain)));
    EXPECT_TRUE(at::equal(fsdp.full_parameter("list.1.weight", -1), first(plain)));
  });
}

TEST(FsdpFullParams, AReplacementOfAnotherDtypeIsConvertedAndStillTrains) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group);
    loss_of(fsdp(rows(0, rank, 2))).backward();
    fsdp.zero_grad();
    {
      auto whole = fsdp.summon_full_params();
      net->head->weight.set_data(at::full({2, 3}, 0.5, at::kDouble));
    }
    EXPECT_TRUE(at::equal(fsdp.full_parameter("head.weight", -1), at::full({2, 3}, 0.5)));
    loss_of(fsdp(rows(0, rank, 2))).backward();
    for (const auto& [name, shard] : fsdp.named_parameters())
      EXPECT_TRUE(shard.numel() == 0 || shard.grad().defined()) << name;
  });
}

TEST(FsdpFullParams, AnotherShapeOnOneRankIsAnErrorOnAllAndWritesNothing) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Mixed>(1), plain = seeded<Mixed>(1);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      EXPECT_THAT(thrown_by([&] {
                    auto whole = fsdp.summon_full_params();
                    at::NoGradGuard no_grad;
                    // A single rank's parameters are its shards, so it would write these.
                    if (world > 1) net->conv->weight.fill_(7);
                    if (rank == world - 1) net->conv->weight.set_data(at::zeros({5, 3, 2, 3}));
                    whole.end();
                  }),
                  AllOf(HasSubstr("conv.weight"), HasSubstr("[5, 3, 2, 3]"),
                        HasSubstr("[5, 2, 3, 3]"), HasSubstr("rank " + std::to_string(world - 1))));
      EXPECT_TRUE(at::equal(conv_of(fsdp), plain->conv->weight));
      EXPECT_TRUE(at::equal(fsdp(images(0)), plain(images(0))));
    });
  }
}

TEST(FsdpFullParams, EndWritesBackAndShardsTheParametersAgain) {
  run_ranks(2, [&](ProcessGroup group, int) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    auto whole = fsdp.summon_full_params();
    {
      torch::NoGradGuard no_grad;
      net->head->weight.fill_(2);
    }
    whole.end();
    whole.end();
    EXPECT_THAT(thrown_by([&] { net->head->weight.sum(); }), HasSubstr("head.weight"));
    EXPECT_TRUE(at::equal(fsdp.full_parameter("head.weight", -1), at::full({2, 3}, 2.0)));
    fsdp(rows(0));
  });
}

TEST(FsdpFullParams, ABodyThatThrowsOnOneRankKeepsItsErrorAndTheOthersGetOne) {
  for (int world = 1; world <= 4; ++world) {
    for (const auto backend : {Backend::SharedMemory, Backend::Gloo}) {
      ProcessGroupOptions options;
      options.backend = backend;
      const auto errors = run_ranks_catching(
          world,
          [&](ProcessGroup group, int rank) {
            auto net = seeded<Chain>(1);
            FullyShardedDataParallel fsdp(net, group, every_leaf());
            auto whole = fsdp.summon_full_params();
            torch::NoGradGuard no_grad;
            net->head->weight.fill_(2);
            if (rank == 0) throw std::out_of_range("no such file");
          },
          options);
      EXPECT_THROW(std::rethrow_exception(errors[0]), std::out_of_range);
      for (int rank = 1; rank < world; ++rank)
        EXPECT_THROW(std::rethrow_exception(errors[rank]), Error) << rank;
    }
  }
}

TEST(FsdpFullParams, ABodyThatThrewIsFollowedByTheNextCollective) {
  run_ranks(3, [&](ProcessGroup group, int) {
    auto net = seeded<Chain>(1), plain = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    EXPECT_THROW(
        {
          auto whole = fsdp.summon_full_params();
          torch::NoGradGuard no_grad;
          net->head->weight.fill_(2);
          throw std::out_of_range("on all ranks");
        },
        std::out_of_range);
    EXPECT_TRUE(at::equal(fsdp(rows(0)), plain(rows(0)))) << "nothing was written";
  });
}

TEST(FsdpErrors, RanksWithOtherMemoryOrdersAreRefused) {
  const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
    auto net = seeded<Mixed>(1);
    if (rank == 1) net->conv->weight.set_data(net->conv->weight.detach().contiguous());
    FullyShardedDataParallel fsdp(net, group, every_leaf());
  });
  expect_usage_errors(errors, "the ranks differ");
  expect_usage_errors(errors, "conv.weight Float [5, 2, 3, 3] trainable strides [18, 1, 6, 2]");
}

// libtorch writes the storage without an operator, so its error cannot have another text.
TEST(FsdpErrors, TorchSaveThrowsAndWorksInsideSummonFullParams) {
  const auto path = std::filesystem::temp_directory_path() / "tessera-fsdp-errors.pt";
  for (int world = 2; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Chain>(1);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      const auto file = path.string() + std::to_string(rank);
      EXPECT_THROW(torch::save(net, file), c10::Error);
      {
        auto whole = fsdp.summon_full_params("", false);
        torch::save(net, file);
      }
      auto loaded = seeded<Chain>(2), plain = seeded<Chain>(1);
      torch::load(loaded, file);
      EXPECT_TRUE(at::equal(loaded->head->weight, plain->head->weight));
      std::filesystem::remove(file);
    });
  }
}

TEST(FsdpErrors, AnAccessorOfAReleasedParameterThrows) {
  run_ranks(2, [&](ProcessGroup group, int) {
    auto net = seeded<Chain>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    EXPECT_THROW((net->head->weight.accessor<float, 2>()), c10::Error);
    EXPECT_THROW(net->head->weight.data_ptr<float>(), c10::Error);
  });
}

FullyShardedDataParallelOptions in_bfloat16() {
  auto options = every_leaf();
  options.mixed_precision.param_dtype = at::kBFloat16;
  return options;
}

/// Multiplies by a constant that has the default dtype.
struct WithConstantImpl : torch::nn::Module {
  WithConstantImpl() : linear(register_module("linear", torch::nn::Linear(3, 3))) {}
  torch::Tensor forward(torch::Tensor x) { return linear(x * 2 + at::ones({3})); }
  torch::nn::Linear linear;
};
TORCH_MODULE(WithConstant);

TEST(FsdpErrors, DtypesThatClashInForwardNameTheOptionAndTheParameter) {
  for (int world = 1; world <= 3; ++world) {
    const auto errors = run_ranks_catching(world, [&](ProcessGroup group, int) {
      FullyShardedDataParallel fsdp(WithConstant(), group, in_bfloat16());
      fsdp(rows(0));
    });
    for (const char* text : {"with parameter linear.", "rank ", "dtype",
                             "option mixed_precision.param_dtype", "cast_input(tensor)"})
      expect_usage_errors(errors, text);
  }
}

TEST(FsdpErrors, DtypesThatClashWithoutAParameterNameTheOption) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, in_bfloat16());
    fsdp.call([&](Chain& net) {
      return at::mm(net->forward(rows(0).to(at::kBFloat16)), at::ones({2, 2}));
    });
  });
  expect_usage_errors(errors, "option mixed_precision.param_dtype is BFloat16");
}

/// A product whose backward, by mistake, computes in float.
struct Product : torch::autograd::Function<Product> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor w) {
    context->save_for_backward({w});
    return x.mm(w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto w = context->get_saved_variables()[0];
    return {gradients[0].to(at::kFloat).mm(w.t()), at::zeros_like(w)};
  }
};

TEST(FsdpErrors, DtypesThatClashInBackwardNameTheOptionAndTheParameter) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, in_bfloat16());
    const auto y = fsdp.call([&](Chain& net) {
      return Product::apply(rows(0).to(at::kBFloat16).requires_grad_(),
                            net->list[0]->named_parameters()["weight"]);
    });
    y.sum().backward();
  });
  expect_usage_errors(errors, "aten::mm with parameter list.0.weight");
  expect_usage_errors(errors, "option mixed_precision.param_dtype is BFloat16");
}

TEST(FsdpErrors, OtherErrorsOfForwardStayAsTheyAre) {
  run_ranks(2, [&](ProcessGroup group, int) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, in_bfloat16());
    EXPECT_THROW(fsdp(at::ones({2, 17})), c10::Error);
    FullyShardedDataParallel plain(seeded<WithConstant>(1), group, every_leaf());
    EXPECT_THROW(plain(rows(0).to(at::kDouble)), c10::Error);
  });
}

/// Sets its scale from the first batch, as the activation normalisation of Glow does.
struct ActNormImpl : torch::nn::Module {
  ActNormImpl() {
    scale = register_parameter("scale", torch::ones({3}));
    linear = register_module("linear", torch::nn::Linear(3, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    if (!ready) {
      scale.set_data(1 / x.detach().std(0));
      ready = true;
    }
    return linear(x * scale);
  }
  torch::Tensor scale;
  torch::nn::Linear linear{nullptr};
  bool ready = false;
};
TORCH_MODULE(ActNorm);

TEST(FsdpErrors, AParameterThatIsReplacedInForwardIsNamedAtItsEnd) {
  for (int world = 1; world <= 4; ++world) {
    const auto errors = run_ranks_catching(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<ActNorm>(1);
      net->ready = rank > 0;  // one rank's mistake is an error on all
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      loss_of(fsdp(rows(0))).backward();
    });
    expect_usage_errors(errors, "parameter scale has other storage than at the beginning");
    expect_usage_errors(errors, "one forward of the module before it is wrapped");
  }
  run_ranks(2, [&](ProcessGroup group, int) {
    auto net = seeded<ActNorm>(1), plain = seeded<ActNorm>(1);
    net->forward(rows(0));
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    EXPECT_TRUE(at::equal(fsdp(rows(0)), plain(rows(0))));
  });
}

/// Uses two cells in turn, `length` times.
struct AlternatingImpl : torch::nn::Module {
  AlternatingImpl() {
    for (int i = 0; i < 4; ++i) cells->push_back(torch::nn::Linear(3, 3));
    register_module("cells", cells);
    head = register_module("head", torch::nn::Linear(3, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < length; ++i)
      for (const auto& cell : *cells) x = torch::tanh(cell->as<torch::nn::Linear>()->forward(x));
    return head(x);
  }
  int length = 1;
  torch::nn::ModuleList cells;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Alternating);

TEST(FsdpForward, SequencesOfDifferentLengthsGiveTheSumOfAllRanks) {
  for (int world = 2; world <= 4; ++world) {
    auto kept = every_leaf();
    kept.sharding_strategy = ShardingStrategy::shard_grad_op;
    for (const auto& options : {FullyShardedDataParallelOptions(), every_leaf(), kept}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Alternating>(1), plain = seeded<Alternating>(1);
        FullyShardedDataParallel fsdp(net, group, options);
        torch::optim::SGD sgd(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
        for (int step = 0; step < 6; ++step) {
          net->length = 1 + (rank + step) % 3;
          sgd.zero_grad();
          loss_of(fsdp(rows(step, rank, world))).backward();
          sgd.step();
          reference.zero_grad();
          for (int r = 0; r < world; ++r) {
            plain->length = 1 + (r + step) % 3;
            (loss_of(plain(rows(step, r, world))) / world).backward();
          }
          reference.step();
        }
        const auto expected = plain->named_parameters();
        for (const auto& [name, value] : fsdp.state_dict(-1))
          EXPECT_TRUE(at::allclose(value, expected[name], 1e-4, 1e-5)) << name << world;
      });
    }
  }
}

}  // namespace
}  // namespace tessera::testing
