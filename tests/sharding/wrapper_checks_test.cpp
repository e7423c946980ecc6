// What every wrapper refuses in the same way.
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/local_sgd.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// The rows that it reads are scaled to the norm 1 at most, in the weight itself.
struct TableImpl : torch::nn::Module {
  TableImpl() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 4).max_norm(1.0)));
    const at::NoGradGuard no_grad;
    table->weight.fill_(2);
  }
  at::Tensor forward(at::Tensor rows) { return table(rows); }
  torch::nn::Embedding table{nullptr};
};
TORCH_MODULE(Table);

OptimizerFactory sgd_factory() { return default_optimizers().factory("SGD", {{"lr", 0.1}}); }

/// Two steps of a Table, in which the rank reads `row`.
using TrainTable = std::function<void(ProcessGroup group, Table net, int64_t row)>;

template <class Forward, class Step>
void two_steps(const Forward& forward, int64_t row, const Step& step) {
  for (int i = 0; i < 2; ++i) {
    forward(at::full({1}, row, at::kLong)).sum().backward();
    step();
  }
}

const std::vector<std::pair<std::string, TrainTable>> kTables{
    {"DistributedDataParallel",
     [](ProcessGroup group, Table net, int64_t row) {
       DistributedDataParallel ddp(net, group);
       torch::optim::SGD sgd(net->parameters(), 0.1);
       two_steps([&](at::Tensor x) { return ddp(x); }, row, [&] { sgd.step(); });
     }},
    {"DistributedOptimizer",
     [](ProcessGroup group, Table net, int64_t row) {
       DistributedOptimizer optimizer(*net, group, sgd_factory(), {.reduce_method = "mean"});
       two_steps([&](at::Tensor x) { return net(x); }, row, [&] { optimizer.step(); });
     }},
    {"FullyShardedDataParallel", [](ProcessGroup group, Table net, int64_t row) {
       FullyShardedDataParallel fsdp(net, group, {.sharding_strategy = ShardingStrategy::no_shard});
       torch::optim::SGD sgd(fsdp.parameters(), 0.1);
       two_steps([&](at::Tensor x) { return fsdp(x); }, row, [&] { sgd.step(); });
     }}};

TEST(ForwardThatWrites, IsRefusedWhereTheRanksWriteOtherValues) {
  for (const auto& [name, train] : kTables) {
    SCOPED_TRACE(name);
    const auto errors = run_ranks_catching(
        2, [&](ProcessGroup group, int rank) { train(group, seeded<Table>(1), rank); });
    expect_usage_errors(errors, "parameter table.weight was written before backward");
    expect_usage_errors(errors, name);
  }
}

TEST(ForwardThatWrites, WorksWhereTheRanksWriteTheSameValuesAndOnOneRank) {
  for (const auto& [name, train] : kTables) {
    SCOPED_TRACE(name);
    for (const int world : {1, 2}) {
      run_ranks(world, [&](ProcessGroup group, int) {
        auto net = seeded<Table>(1);
        train(group, net, 3);
        EXPECT_EQ(net->table->weight[0][0].item<float>(), 2);  // not read, so not scaled
        EXPECT_LT(net->table->weight[3][0].item<float>(), 1);
      });
    }
  }
}

/// One rank evaluates other weights, with gradients enabled, and restores its own.
TEST(ForwardThatWrites, MayBeAroundAnEvaluationOfOneRankUnderDistributedDataParallel) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    const auto write = [&](double factor) {
      const at::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.mul_(factor);
    };
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      loss_of(ddp(rows(step, rank, 2))).backward();
      if (rank != 0) continue;
      net->eval();
      write(2);
      ddp(rows(0));
      write(0.5);
      net->train();
    }
  });
}

/// DistributedOptimizer sees no forward. So it compares what was written since the last step, which
/// the program may have done on one rank alone: averaged weights for an evaluation, and back.
TEST(ForwardThatWrites, MayBeTheProgramsOwnOnOneRankIfTheValuesAreAsBefore) {
  for (const double change : {0.0, 0.5}) {
    const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      DistributedOptimizer optimizer(*net, group, sgd_factory(), {.reduce_method = "mean"});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        if (step == 2 && rank == 1) {
          const at::NoGradGuard no_grad;
          net->scale.mul_(4);
          net->scale.div_(4).add_(change);
        }
        loss_of(net(rows(step, rank, 3))).backward();
        optimizer.step();
      }
    });
    if (change == 0)
      for (const auto& error : errors) EXPECT_FALSE(error);
    else expect_usage_errors(errors, "parameter scale was written before backward, and has other");
  }
}

TEST(ForwardThatWrites, IsNoErrorWhereThePeriodOfBroadcastsEndsTheDifference) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Table>(1);
    DistributedOptimizer optimizer(*net, group, sgd_factory(),
                                   {.reduce_method = "mean", .bcast_period = 1});
    two_steps([&](at::Tensor x) { return net(x); }, rank, [&] { optimizer.step(); });
    const auto all = group.all_gather(net->table->weight.detach()).view({2, -1});
    EXPECT_TRUE(at::equal(all[0], all[1]));
  });
}

TEST(ForwardThatWrites, LeavesTheRanksOfZeroWithEqualParameters) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Table>(1);
    ZeroRedundancyOptimizer zero(*net, group, sgd_factory());
    two_steps([&](at::Tensor x) { return net(x); }, rank, [&] { zero.step(); });
    const auto all = group.all_gather(net->table->weight.detach()).view({2, -1});
    EXPECT_TRUE(at::equal(all[0], all[1]));
  });
}

TEST(ForwardThatWrites, StepsThatOnlyTheOptimizerWritesCompareNothing) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group);
    torch::optim::Adam adam(net->parameters(), 0.1);
    for (int step = 0; step < 4; ++step) {
      if (step == 3) group.reset_stats();  // the buckets have been made again
      adam.zero_grad();
      loss_of(ddp(rows(step, rank, 2))).backward();
      adam.step();
    }
    EXPECT_EQ(group.stats().bytes.calls, 0U);
  });
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedOptimizer optimizer(*net, group, sgd_factory(), {.reduce_method = "mean"});
    group.reset_stats();
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(net(rows(step, rank, 2))).backward();
      optimizer.step();
    }
    EXPECT_EQ(group.stats().bytes.calls, 0U);
  });
}

using Construct = std::function<void(torch::nn::Module& net)>;
const std::vector<std::pair<std::string, Construct>> kConstructions{
    {"DistributedDataParallel",
     [](torch::nn::Module& net) {
       DistributedDataParallel ddp(dynamic_cast<UnevenImpl*>(&net), ProcessGroup());
     }},
    {"ZeroRedundancyOptimizer",
     [](torch::nn::Module& net) {
       ZeroRedundancyOptimizer zero(net, ProcessGroup(), sgd_factory());
     }},
    {"DistributedOptimizer",
     [](torch::nn::Module& net) {
       DistributedOptimizer optimizer(net, ProcessGroup(), sgd_factory(), {});
     }},
    {"LocalSgd", [](torch::nn::Module& net) {
       const auto scale = net.named_parameters()["scale"];
       LocalSgd local(ProcessGroup(), {{{"scale", {1}, 0, 1}, scale}});
     }}};

TEST(InferenceMode, AWrapperThatIsMadeInItIsRefused) {
  for (const auto& [name, construct] : kConstructions) {
    auto net = seeded<Uneven>(1);
    const c10::InferenceMode inference;
    EXPECT_THAT(thrown_by([&] { construct(*net); }),
                AllOf(HasSubstr(name + ": rank 0: it is constructed in InferenceMode"),
                      HasSubstr("constructed outside of it")));
  }
}

TEST(InferenceMode, AParameterThatWasMadeInItIsNamed) {
  for (const auto& [name, construct] : kConstructions) {
    auto net = [] {
      const c10::InferenceMode inference;
      return seeded<Uneven>(1);
    }();
    EXPECT_THAT(thrown_by([&] { construct(*net); }),
                HasSubstr(name + ": rank 0: parameter scale was made in InferenceMode"));
  }
}

struct WithSparse : torch::nn::Module {
  WithSparse() {
    weight = register_parameter("weight", torch::ones({2}));
    graph = register_buffer("graph", torch::eye(2).to_sparse());
  }
  at::Tensor forward(at::Tensor x) { return torch::mv(graph.to_dense(), x * weight); }
  at::Tensor weight, graph;
};

TEST(SparseBuffers, AreNamed) {
  for (const bool ddp : {true, false}) {
    expect_usage_errors(run_ranks_catching(2,
                                           [&](ProcessGroup group, int) {
                                             auto net = std::make_shared<WithSparse>();
                                             if (ddp)
                                               DistributedDataParallel<std::shared_ptr<WithSparse>>(
                                                   net, group);
                                             else
                                               DistributedOptimizer(*net, group, sgd_factory(),
                                                                    {.reduce_method = "mean"});
                                           }),
                        "buffer graph of the module has the layout Sparse");
  }
}

TEST(DdpTexts, AReplacedModuleIsNamedAndNotSilent) {
  for (const bool find_unused : {false, true}) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(1);
      DistributedDataParallel ddp(net, group, {.find_unused_parameters = find_unused});
      net->last = net->replace_module("last", torch::nn::Linear(7, 2));
      loss_of(ddp(rows(1, rank, 2))).backward();
    });
    expect_usage_errors(errors, find_unused
                                    ? "parameter last.weight was not in the module at construction"
                                    : "construct the DistributedDataParallel again if a module was "
                                      "replaced");
  }
}

TEST(DdpTexts, AFirstGradientThatStaticGraphDoesNotHaveIsNotASecondOne) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int) {
    auto net = seeded<Uneven>(1);
    DistributedDataParallel ddp(net, group, {.static_graph = true});
    ddp(rows(0));
    net->first->weight.sum().backward();
    net->zero_grad();
    loss_of(ddp(rows(1))).backward();
  });
  expect_usage_errors(errors, "got gradient 1 in this backward, and 0 in the first one");
}

TEST(ZeroTexts, ASecondGradientDoesNotAdviseAnOptionThatZeroLacks) {
  const auto errors = run_ranks_catching(1, [](ProcessGroup group, int) {
    auto net = seeded<Uneven>(1);
    ZeroRedundancyOptimizer zero(*net, group, sgd_factory(), {.shard_gradients = true});
    const auto halves = [&](at::Tensor x) {
      return tessera::checkpoint([&](at::Tensor part) { return net(part); }, x);
    };
    (halves(rows(0)).sum() + halves(rows(1)).sum()).backward();
  });
  const auto text = message_of(errors[0]);
  EXPECT_THAT(text, HasSubstr("got a second gradient in one backward"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("static_graph")));
}

TEST(Checkpoint, ItsOutputHasNoGraphWhereNothingInsideIsTrainable) {
  auto net = seeded<Uneven>(1);
  int runs = 0;
  const auto run = [&](at::Tensor x) {
    return tessera::checkpoint(
        [&](at::Tensor in) {
          ++runs;
          return net(in);
        },
        x);
  };
  const auto x = rows(0);
  for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
  EXPECT_FALSE(run(x).requires_grad());
  EXPECT_TRUE(run(x.clone().requires_grad_()).requires_grad());
  EXPECT_EQ(runs, 2);
  net->last->bias.requires_grad_(true);
  const auto output = run(x);
  EXPECT_TRUE(output.requires_grad());
  EXPECT_TRUE(at::equal(output, net(x)));
  EXPECT_EQ(runs, 3);
  output.sum().backward();
  EXPECT_EQ(runs, 4);
  EXPECT_EQ(net->last->bias.grad()[0].item<float>(), 12);
  EXPECT_FALSE(net->last->weight.grad().defined());
}

}  // namespace
}  // namespace tessera::testing
