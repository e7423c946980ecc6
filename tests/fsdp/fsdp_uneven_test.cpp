#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/fully_sharded_data_parallel.h"

// Parameters and units that only some ranks use in a step: experts, tasks, branches. The mean
// counts the ranks without a gradient as zero, and a parameter that no rank used has none.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Options = FullyShardedDataParallelOptions;
using Chosen = std::vector<int>;
/// The experts that a rank uses in a step, in this order.
using Route = std::function<Chosen(int step, int rank)>;

constexpr int kExperts = 4, kSteps = 5;

struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    stem = register_module("stem", torch::nn::Linear(3, 5));
    for (int e = 0; e < kExperts; ++e) experts->push_back(torch::nn::Linear(5, 5));
    register_module("experts", experts);
    extra = register_parameter("extra", torch::full({7}, 0.3));
    head = register_module("head", torch::nn::Linear(5, 2));
  }
  torch::Tensor forward(torch::Tensor x, const Chosen& chosen) {
    x = torch::tanh(stem(x));
    for (const int e : chosen) x = x + torch::tanh(apply(e, x));
    if (!chosen.empty() && chosen[0] == 1) x = x * extra.sum();
    return head(x);
  }
  torch::Tensor apply(int e, const torch::Tensor& x) {
    const auto expert = [this, e](const torch::Tensor& in) {
      return (*experts)[e]->as<torch::nn::Linear>()->forward(in);
    };
    return recomputes ? checkpoint(expert, x) : expert(x);
  }
  bool recomputes = false;
  torch::nn::Linear stem{nullptr}, head{nullptr};
  torch::nn::ModuleList experts;
  torch::Tensor extra;
};
TORCH_MODULE(Experts);

at::Tensor batch(int step, int rank) {
  return at::randn({4, 3}, at::make_generator<at::CPUGeneratorImpl>(100 * step + rank));
}

struct Flow {
  bool recomputes = false, evaluates = false;
  int accumulated = 1;  // backwards of a step, all but the last under no_sync()
  double max_norm = 0;
};

template <class Net>
std::unique_ptr<torch::optim::Optimizer> make_optimizer(Net& parameters) {
  return std::make_unique<torch::optim::AdamW>(
      parameters, torch::optim::AdamWOptions(0.02).weight_decay(0.1).eps(1e-4));
}

std::vector<at::Tensor> train_plainly(int world, const Route& route, const Flow& run) {
  auto net = seeded<Experts>(3);
  const auto parameters = net->parameters();
  auto optimizer = make_optimizer(parameters);
  for (int step = 0; step < kSteps; ++step) {
    clear_gradients(parameters);
    for (int part = 0; part < run.accumulated; ++part)
      for (int rank = 0; rank < world; ++rank) {
        const int number = run.accumulated * step + part;
        (net(batch(number, rank), route(number, rank)).square().mean() / world).backward();
      }
    if (run.max_norm > 0) torch::nn::utils::clip_grad_norm_(parameters, run.max_norm);
    optimizer->step();
  }
  std::vector<at::Tensor> result;
  for (const auto& each : parameters) result.push_back(each.detach().clone());
  return result;
}

void expect_parity(const std::string& where, int world, const Options& options, const Route& route,
                   const Flow& run = {}, const std::vector<int>& hosts = {}) {
  const auto plain = train_plainly(world, route, run);
  run_ranks(
      world,
      [&](ProcessGroup group, int rank) {
        auto net = seeded<Experts>(3);
        net->recomputes = run.recomputes;
        FullyShardedDataParallel fsdp(net, group, options);
        const auto shards = fsdp.parameters();
        auto optimizer = make_optimizer(shards);
        for (int step = 0; step < kSteps; ++step) {
          fsdp.zero_grad(true);
          for (int part = 0; part < run.accumulated; ++part) {
            std::optional<NoSync> held;
            if (part + 1 < run.accumulated) held.emplace(fsdp.no_sync());
            const int number = run.accumulated * step + part;
            fsdp(batch(number, rank), route(number, rank)).square().mean().backward();
          }
          if (run.max_norm > 0) fsdp.clip_grad_norm_(run.max_norm);
          optimizer->step();
          if (!run.evaluates) continue;
          const at::NoGradGuard no_grad;
          fsdp(batch(step, rank), route(step + 1, rank));
        }
        const auto whole = fsdp.summon_full_params();
        std::vector<at::Tensor> trained;
        for (const auto& each : net->parameters()) trained.push_back(each.detach().clone());
        const auto place = where + ", rank " + std::to_string(rank);
        if (options.wire.gradients == WireFormat::float32)
          return expect_close(trained, plain, place);
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_LT((trained[i] - plain[i]).abs().max().item<double>(), 0.02) << place;
      },
      {}, hosts);
}

/// Each rank has its own expert, in all steps.
Chosen own(int /*step*/, int rank) { return {rank % kExperts}; }
/// Rank 0 alone uses an expert more, first or last.
Chosen one_more_first(int step, int rank) { return rank == step % 2 ? Chosen{2, 0} : Chosen{0}; }
Chosen one_more_last(int step, int rank) { return rank == 0 ? Chosen{0, 3} : Chosen{0}; }
/// All ranks use the same two, in an order of their own.
Chosen reversed(int /*step*/, int rank) { return rank == 0 ? Chosen{1, 2} : Chosen{2, 1}; }
/// As a router does, which also leaves some experts to no rank.
Chosen routed(int step, int rank) {
  const int number = 7 * step + 3 * rank + step * rank;
  Chosen result;
  for (int e = 0; e < kExperts; ++e)
    if ((number >> e) % 2 == 1) result.push_back(e);
  return result;
}
/// The ranks differ in the third step only.
Chosen rarely(int step, int rank) { return step == 2 && rank == 0 ? Chosen{0, 1} : Chosen{1}; }

const std::vector<std::pair<std::string, Route>> kRoutes = {{"own", own},
                                                            {"one more first", one_more_first},
                                                            {"one more last", one_more_last},
                                                            {"reversed", reversed},
                                                            {"routed", routed},
                                                            {"rarely", rarely}};

Options options_of(ShardingStrategy strategy, bool leaves) {
  Options options;
  options.sharding_strategy = strategy;
  if (leaves) options.wrap_policy = wrap_leaves();
  if (strategy == ShardingStrategy::hybrid_shard) options.shard_group_size = 2;
  return options;
}

void expect_parity_of_all(ShardingStrategy strategy, const std::vector<int>& hosts = {}) {
  for (const auto& [name, route] : kRoutes) {
    for (const bool leaves : {false, true}) {
      for (int world = 1; world <= 4; ++world) {
        if (strategy == ShardingStrategy::hybrid_shard && world % 2 == 1) continue;
        if (!hosts.empty() && static_cast<int>(hosts.size()) != world) continue;
        const auto where =
            name + (leaves ? ", leaves" : ", one unit") + ", world " + std::to_string(world);
        SCOPED_TRACE(where);
        expect_parity(where, world, options_of(strategy, leaves), route, {}, hosts);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(FsdpUneven, FullShard) { expect_parity_of_all(ShardingStrategy::full_shard); }
TEST(FsdpUneven, ShardGradOp) { expect_parity_of_all(ShardingStrategy::shard_grad_op); }
TEST(FsdpUneven, NoShard) { expect_parity_of_all(ShardingStrategy::no_shard); }
TEST(FsdpUneven, HybridShard) { expect_parity_of_all(ShardingStrategy::hybrid_shard); }

TEST(FsdpUneven, BetweenHosts) {
  for (const auto& hosts : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}}) {
    expect_parity_of_all(ShardingStrategy::full_shard, hosts);
    expect_parity_of_all(ShardingStrategy::shard_grad_op, hosts);
    expect_parity_of_all(ShardingStrategy::hybrid_shard, hosts);
  }
}

const std::vector<std::vector<int>> kPlaces = {{0, 0}, {0, 1}, {0, 0, 1, 1}};

void expect_parity_everywhere(const Options& options, const Flow& run) {
  for (const auto& hosts : kPlaces) {
    for (const auto& [name, route] : kRoutes) {
      const auto where = name + ", hosts " + ::testing::PrintToString(hosts);
      SCOPED_TRACE(where);
      expect_parity(where, static_cast<int>(hosts.size()), options, route, run, hosts);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(FsdpUneven, WithEachOverlap) {
  for (const auto overlap : {Overlap::none, Overlap::backward, Overlap::background}) {
    for (const bool leaves : {false, true}) {
      SCOPED_TRACE(static_cast<int>(overlap));
      auto options = options_of(ShardingStrategy::full_shard, leaves);
      options.overlap = overlap;
      expect_parity_everywhere(options, {});
    }
  }
}

TEST(FsdpUneven, WithPrefetchAfterGradientsAndLittleMemory) {
  auto options = options_of(ShardingStrategy::full_shard, true);
  options.backward_prefetch = BackwardPrefetch::post;
  options.resident_bytes = 1;
  expect_parity_everywhere(options, {});
}

TEST(FsdpUneven, WithWholeParameters) {
  auto options = options_of(ShardingStrategy::full_shard, true);
  options.partition = Partition::whole;
  expect_parity_everywhere(options, {});
}

TEST(FsdpUneven, WithAccumulationClippingAndEvaluation) {
  Flow run;
  run.accumulated = 3;
  run.max_norm = 0.1;
  run.evaluates = true;
  for (const auto strategy :
       {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard})
    for (const bool leaves : {false, true})
      expect_parity_everywhere(options_of(strategy, leaves), run);
}

TEST(FsdpUneven, WithActivationCheckpoints) {
  Flow run;
  run.recomputes = true;
  expect_parity_everywhere(options_of(ShardingStrategy::full_shard, true), run);
}

TEST(FsdpUneven, WithGradientsOfAnotherDtype) {
  auto options = options_of(ShardingStrategy::full_shard, true);
  options.mixed_precision.param_dtype = at::kFloat;
  options.mixed_precision.reduce_dtype = at::kDouble;
  expect_parity_everywhere(options, {});
}

// Where nothing differs, no message is added. Otherwise, a step has the messages with which the
// ranks find each other again, and one that says which parameters have gradients.
TEST(FsdpUneven, CollectivesOfAStep) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Experts>(3);
    FullyShardedDataParallel fsdp(net, group, options_of(ShardingStrategy::full_shard, true));
    const auto all_reduces_of_step = [&](const Chosen& chosen) {
      fsdp.zero_grad(true);
      group.reset_stats();
      fsdp(batch(0, rank), chosen).square().mean().backward();
      return group.stats().all_reduce.calls;
    };
    EXPECT_EQ(all_reduces_of_step({0}), 0U);
    EXPECT_EQ(all_reduces_of_step({0}), 0U);
    EXPECT_EQ(all_reduces_of_step({rank}), 2U);
    EXPECT_EQ(all_reduces_of_step({rank}), 2U);
    EXPECT_EQ(all_reduces_of_step({0}), 0U);
    EXPECT_EQ(fsdp.stats().gathered_bytes, 0);
    EXPECT_EQ(fsdp.stats().gradient_bytes, 0);
  });
}

TEST(FsdpUneven, AParameterThatNoRankUsedHasNoGradient) {
  for (const bool leaves : {false, true}) {
    run_ranks(3, [&](ProcessGroup group, int rank) {
      auto net = seeded<Experts>(3);
      FullyShardedDataParallel fsdp(net, group, options_of(ShardingStrategy::full_shard, leaves));
      fsdp(batch(0, rank), Chosen{rank == 2 ? 3 : 0}).square().mean().backward();
      for (const auto& [name, shard] : fsdp.named_parameters()) {
        const bool unused =
            name.rfind("experts.1", 0) == 0 || name.rfind("experts.2", 0) == 0 || name == "extra";
        EXPECT_EQ(shard.grad().defined(), !unused) << name;
      }
    });
  }
}

// Only the ranks' use of parameters may differ.
TEST(FsdpUneven, OtherCollectivesAreComparedAsBefore) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Experts>(3), group,
                                  options_of(ShardingStrategy::full_shard, true));
    if (rank == 0) group.barrier("of the program");
    fsdp(batch(0, rank), Chosen{0}).square().mean().backward();
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), AllOf(HasSubstr("rank 0 calls barrier"),
                                         HasSubstr("of the program"), HasSubstr("gather of unit")));
}

TEST(FsdpUneven, UnequalNumbersOfBackwardsAreAnError) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Experts>(3), group, {});
    if (rank == 0) fsdp(batch(0, rank), Chosen{0});
    fsdp(batch(0, rank), Chosen{0}).square().mean().backward();
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), HasSubstr("the ranks disagree about a collective"));
}

/// In some steps all ranks use the same experts, in others each rank draws its own, in any order.
Route drawn(uint64_t seed) {
  return [seed](int step, int rank) {
    std::mt19937_64 step_random(1000 * seed + static_cast<uint64_t>(step));
    const bool same = step_random() % 3 == 0;
    std::mt19937_64 random(100'000 * seed + static_cast<uint64_t>(10 * step + (same ? 0 : rank)));
    Chosen result{0, 1, 2, 3};
    for (size_t i = result.size(); i > 1; --i) std::swap(result[i - 1], result[random() % i]);
    result.resize(random() % 5);
    return result;
  };
}

void expect_parity_of_draw(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&random](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> all{values...};
    return all[random() % all.size()];
  };
  const int world = pick(2, 3, 4, 4);
  auto strategy = pick(ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                       ShardingStrategy::no_shard, ShardingStrategy::hybrid_shard);
  if (strategy == ShardingStrategy::hybrid_shard && world < 4)
    strategy = ShardingStrategy::full_shard;
  auto options = options_of(strategy, random() % 4 != 0);
  options.overlap = pick(Overlap::none, Overlap::backward, Overlap::background);
  options.backward_prefetch =
      pick(BackwardPrefetch::pre, BackwardPrefetch::post, BackwardPrefetch::none);
  if (strategy != ShardingStrategy::shard_grad_op) options.resident_bytes = pick(0, 1, 1 << 20);
  if (random() % 4 == 0) options.wire.gradients = WireFormat::bfloat16;
  Flow run;
  run.recomputes = random() % 4 == 0;
  run.evaluates = random() % 3 == 0;
  run.accumulated = pick(1, 1, 2);
  run.max_norm = pick(0., 0., 0.1);
  std::vector<int> hosts;
  for (int rank = 0; rank < world; ++rank) hosts.push_back(rank * pick(1, 2) / world);
  if (random() % 3 == 0) hosts.clear();
  expect_parity("seed " + std::to_string(seed), world, options, drawn(seed), run, hosts);
}

// No rank may wait in a collective that another rank does not make.
TEST(FsdpUneven, DrawnAtRandom) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    expect_parity_of_draw(seed);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
