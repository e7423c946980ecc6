// What shares memory with parameters, parameters without elements or memory, and wrappers after
// wrappers.

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/temporary_folder.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
namespace nn = torch::nn;

/// Two layers, the second of which may share its weight with something.
struct SharingImpl : nn::Module {
  explicit SharingImpl(const std::string& how) {
    a = register_module("a", nn::Linear(3, 3));
    b = register_module("b", nn::Linear(3, 3));
    if (how == "set_data") b->weight.set_data(a->weight.data());
    if (how == "view") kept = a->weight.t();
    if (how == "detached") kept = a->weight.detach();
    if (how == "buffer") register_buffer("w", a->weight.detach());
    if (how == "row as buffer") register_buffer("w", a->weight.detach()[2]);
    if (how == "graph") kept = torch::mm(a->weight.t(), b->weight).sum();
    if (how == "own memory") b->weight.set_data(torch::from_blob(own.data(), {3, 3}));
    if (how == "parts of a tensor") {
      kept = torch::randn({18});
      a->register_parameter("first", kept.narrow(0, 0, 9));
      a->register_parameter("second", kept.narrow(0, 9, 9));
    }
    if (how == "one address twice") {
      const auto nothing = [](void*) {};
      a->weight.set_data(torch::from_blob(own.data(), {3, 3}, nothing));
      b->weight.set_data(torch::from_blob(own.data() + 3, {3, 3}, nothing));
    }
    // What shares nothing:
    if (how == "two names") b->register_parameter("other", a->weight);
    if (how == "transposed") a->register_parameter("extra", torch::randn({4, 3}).t());
    if (how == "parts") {
      const auto whole = torch::randn({18});
      a->register_parameter("first", whole.narrow(0, 0, 9));
      a->register_parameter("second", whole.narrow(0, 9, 9));
    }
    if (how == "after a backward") forward(torch::ones({2, 3})).sum().backward();
    if (how == "loaded") {
      const TemporaryFolder folder;
      torch::save(a, folder.path() + "/a.pt");
      torch::load(a, folder.path() + "/a.pt");
    }
    if (how == "lstm") register_module("lstm", nn::LSTM(3, 4));
    if (how == "clone") kept = a->weight.clone();
  }
  torch::Tensor forward(torch::Tensor x) { return b(torch::tanh(a(x))); }
  nn::Linear a{nullptr}, b{nullptr};
  torch::Tensor kept;
  std::vector<float> own = std::vector<float>(12, 0.2f);
};
TORCH_MODULE(Sharing);

TEST(FsdpSharedMemory, WhatSharesAParametersMemoryIsNamed) {
  const std::vector<std::pair<std::string, std::pair<std::string, std::string>>> cases = {
      {"set_data", {"b.weight", "parameter a.weight"}},
      {"view", {"a.weight", "1 tensor(s) that the module has not registered"}},
      {"detached", {"a.weight", "1 tensor(s) that the module has not registered"}},
      {"buffer", {"a.weight", "buffer w"}},
      {"row as buffer", {"a.weight", "buffer w"}},
      {"graph", {"a.weight", "graph that the program keeps"}},
      {"own memory", {"b.weight", "the program, which owns it (from_blob)"}},
      {"parts of a tensor", {"a.first", "1 tensor(s) that the module has not registered"}},
      {"one address twice", {"b.weight", "parameter a.weight"}}};
  for (const auto& [how, names] : cases) {
    for (int world = 1; world <= 3; ++world) {
      for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
        FullyShardedDataParallelOptions options;
        options.sharding_strategy = strategy;
        const auto errors = run_ranks_catching(world, [&](ProcessGroup group, int rank) {
          // One rank's mistake is an error on all.
          Sharing net = seeded<Sharing>(1, rank == world - 1 ? how : "");
          FullyShardedDataParallel fsdp(net, group, options);
        });
        expect_usage_errors(errors, "rank " + std::to_string(world - 1) + ": parameter " +
                                        names.first + " shares its memory with " +
                                        (names.second[0] == 'g' ? "" : names.second));
        expect_usage_errors(errors, names.second);
      }
    }
  }
}

TEST(FsdpSharedMemory, WhatSharesNothingTrainsAsPlain) {
  for (const std::string how :
       {"", "two names", "transposed", "parts", "after a backward", "loaded", "lstm", "clone"}) {
    for (int world = 1; world <= 3; ++world) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        Sharing net = seeded<Sharing>(1, how), plain = seeded<Sharing>(1, how);
        FullyShardedDataParallel fsdp(net, group, every_leaf());
        auto once = plain->parameters();  // libtorch lists a parameter once for each of its names
        for (size_t i = once.size(); i-- > 0;)
          if (std::any_of(once.begin(), once.begin() + i,
                          [&](const auto& before) { return before.is_same(once[i]); }))
            once.erase(once.begin() + i);
        torch::optim::SGD one(fsdp.parameters(), 0.1), other(once, 0.1);
        plain->zero_grad();
        for (int i = 0; i < 2; ++i) {
          step(fsdp, one, rows(i, rank, world));
          step(plain, other, rows(i));
        }
        for (const auto& [name, value] : fsdp.state_dict(-1))
          EXPECT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-4, 1e-6))
              << how << ", world " << world << ", " << name;
      });
    }
  }
}

/// Layers with and without elements.
struct EmptyPartsImpl : nn::Module {
  EmptyPartsImpl() {
    a = register_module("a", nn::Linear(3, 5));
    none = register_module("none", nn::Linear(nn::LinearOptions(5, 0).bias(false)));
    frozen = register_module("frozen", nn::Linear(nn::LinearOptions(5, 0).bias(false)));
    frozen->weight.set_requires_grad(false);
    last = register_module("last", nn::Linear(5, 2));
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto h = torch::tanh(a(x));
    return last(h) + none(h).sum() + frozen(h).sum();
  }
  nn::Linear a{nullptr}, none{nullptr}, frozen{nullptr}, last{nullptr};
};
TORCH_MODULE(EmptyParts);

TEST(FsdpEmptyUnits, ParametersWithoutElementsTrainAsPlain) {
  for (int world = 1; world <= 3; ++world) {
    for (const auto partition : {Partition::flat, Partition::whole}) {
      for (const bool bf16 : {false, true}) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          EmptyParts net = seeded<EmptyParts>(1), plain = seeded<EmptyParts>(1);
          auto options = every_leaf();
          options.partition = partition;
          if (bf16) options.mixed_precision.param_dtype = at::kBFloat16;
          FullyShardedDataParallel fsdp(net, group, options);
          const auto one = adamw(fsdp.parameters()), other = adamw(plain->parameters());
          for (int i = 0; i < 3; ++i) {
            step(fsdp, *one, rows(i, rank, world));
            step(plain, *other, rows(i));
          }
          for (const auto& [name, value] : fsdp.state_dict(-1)) {
            EXPECT_EQ(value.sizes(), plain->named_parameters()[name].sizes());
            if (!bf16)
              EXPECT_TRUE(at::allclose(value, plain->named_parameters()[name], 1e-4, 1e-6)) << name;
          }
          EXPECT_GE(fsdp.stats().reductions, 9);  // the unit without elements takes part
        });
      }
    }
  }
}

TEST(FsdpEmptyUnits, AModelOfParametersWithoutElementsRuns) {
  for (int world = 1; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int) {
      nn::Linear net(nn::LinearOptions(3, 0).bias(false));
      FullyShardedDataParallel fsdp(net, group);
      fsdp(at::ones({2, 3})).sum().backward();
      EXPECT_EQ(fsdp.parameters()[0].grad().numel(), 0);
    });
  }
}

/// Each makes a wrapper, trains one step with it and destroys it.
std::map<std::string, std::function<void(Chain&, ProcessGroup, const at::Tensor&)>> wrappers() {
  using Train = std::function<void(Chain&, ProcessGroup, const at::Tensor&)>;
  std::map<std::string, Train> all;
  const auto ddp = [](DistributedDataParallelOptions options) -> Train {
    return [options](Chain& net, ProcessGroup group, const at::Tensor& x) {
      DistributedDataParallel wrapped(net, group, options);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      sgd.zero_grad();
      loss_of(wrapped(x)).backward();
      sgd.step();
    };
  };
  const auto zero = [](ZeroRedundancyOptimizerOptions options) -> Train {
    return [options](Chain& net, ProcessGroup group, const at::Tensor& x) {
      ZeroRedundancyOptimizer optimizer(
          *net, group, default_optimizers().factory("SGD", {{"lr", 0.1}}), options);
      net->zero_grad();
      loss_of(net(x)).backward();
      optimizer.step();
    };
  };
  const auto fsdp = [](FullyShardedDataParallelOptions options) -> Train {
    return [options](Chain& net, ProcessGroup group, const at::Tensor& x) {
      FullyShardedDataParallel wrapped(net, group, options);
      torch::optim::SGD sgd(wrapped.parameters(), 0.1);
      loss_of(wrapped(x)).backward();
      sgd.step();
    };
  };
  all["ddp"] = ddp({});
  all["ddp, share_parameters"] = ddp([] {
    DistributedDataParallelOptions options;
    options.share_parameters = true;
    return options;
  }());
  all["ddp, in background"] = ddp([] {
    DistributedDataParallelOptions options;
    options.overlap = Overlap::background;
    return options;
  }());
  all["zero"] = zero({});
  all["zero, share_parameters"] = zero({.share_parameters = true});
  all["zero, no views"] = zero({.parameters_as_bucket_view = false});
  all["zero, in background"] = zero({.overlap = Overlap::background});
  all["distributed optimizer"] = [](Chain& net, ProcessGroup group, const at::Tensor& x) {
    DistributedOptimizer optimizer(*net, group, default_optimizers().factory("SGD", {{"lr", 0.1}}),
                                   {.reduce_method = "mean"});
    net->zero_grad();
    optimizer.backward(loss_of(net(x)));
    optimizer.step();
  };
  all["fsdp"] = fsdp({});
  all["fsdp, no_shard"] = fsdp([] {
    FullyShardedDataParallelOptions options;
    options.sharding_strategy = ShardingStrategy::no_shard;
    return options;
  }());
  return all;
}

TEST(WrapperLifetimes, AfterTheWrapperThatHadTheMemoryEveryOtherNamesTheParameter) {
  const auto all = wrappers();
  for (int world = 1; world <= 2; ++world) {
    for (const auto& [name, wrap] : all) {
      const auto errors = run_ranks_catching(world, [&](ProcessGroup group, int rank) {
        Chain net = seeded<Chain>(1, 2);
        {
          auto options = every_leaf();
          options.mixed_precision.param_dtype = at::kBFloat16;  // its pages at world 1 too
          FullyShardedDataParallel fsdp(net, group, options);
        }
        wrap(net, group, rows(0, rank, world));
      });
      SCOPED_TRACE(name + ", world " + std::to_string(world));
      expect_usage_errors(errors, "rank 0: parameter list.0.weight has no memory");
      expect_usage_errors(errors, "was used after the wrapper was destroyed");
    }
  }
}

TEST(WrapperLifetimes, AWrapperAfterADestroyedOneTrainsAsPlainOrIsAnError) {
  const auto all = wrappers();
  for (const auto& [first, one] : all) {
    for (const auto& [second, other] : all) {
      SCOPED_TRACE(first + ", then " + second);
      const auto errors = run_ranks_catching(2, [&, &one = one, &other = other](ProcessGroup group,
                                                                                int rank) {
        Chain net = seeded<Chain>(1, 2), plain = seeded<Chain>(1, 2);
        one(net, group, rows(0, rank, 2));
        other(net, group, rows(1, rank, 2));
        torch::optim::SGD sgd(plain->parameters(), 0.1);
        step(plain, sgd, rows(0));
        step(plain, sgd, rows(1));
        for (const auto& item : net->named_parameters())
          EXPECT_TRUE(at::allclose(item.value(), plain->named_parameters()[item.key()], 1e-4, 1e-6))
              << item.key();
      });
      // The memory that ranks shared belongs to one of them, so others alone may have none.
      const bool shared = first.find("share_parameters") != std::string::npos;
      int named = 0, failed = 0;
      for (const auto& error : errors) {
        if (!error) continue;
        ++failed;
        try {
          std::rethrow_exception(error);
        } catch (const UsageError& usage) {
          ++named;
        } catch (const BrokenWorldError& broken) {
          EXPECT_TRUE(shared) << broken.what();
          EXPECT_THAT(broken.what(), ::testing::HasSubstr("has left (an error there"));
        }
        EXPECT_TRUE(first == "fsdp" || second == "fsdp" || shared) << message_of(error);
      }
      EXPECT_TRUE(failed == 0 || named > 0);
    }
  }
}

TEST(WrapperLifetimes, AWrapperMadeInInferenceModeIsAnErrorOnAllRanks) {
  for (const auto& [name, wrap] : wrappers()) {
    SCOPED_TRACE(name);
    for (const bool module_too : {false, true}) {
      const auto errors = run_ranks_catching(2, [&, &wrap = wrap](ProcessGroup group, int rank) {
        std::optional<Chain> net;
        if (!module_too) net = seeded<Chain>(1, 2);
        std::optional<c10::InferenceMode> mode(std::in_place);
        if (!net) net = seeded<Chain>(1, 2);
        if (module_too) mode.reset();
        wrap(*net, group, rows(0, rank, 2));
      });
      expect_usage_errors(errors, module_too ? "parameter list.0.weight was made in InferenceMode"
                                             : "it is constructed in InferenceMode");
    }
  }
}

}  // namespace
