#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/fully_sharded_data_parallel.h"

// Parameters that are frozen at construction and thawed later, and the other way round.

namespace {

using namespace tessera;
using namespace tessera::testing;
using Options = FullyShardedDataParallelOptions;

constexpr int kThawSteps = 9;

void set_trainable(torch::nn::Module& module, bool trainable) {
  for (auto& parameter : module.parameters()) parameter.requires_grad_(trainable);
}

/// Before step `step`. The scale is never trained.
void change(Uneven& net, int step) {
  if (step == 0) {
    set_trainable(*net->first, false);
    set_trainable(*net->second, false);
    net->scale.requires_grad_(false);
  }
  if (step == 2) net->second->bias.requires_grad_(true);
  if (step == 3) net->second->weight.requires_grad_(true);
  if (step == 4) set_trainable(*net->last, false);
  if (step == 5) set_trainable(*net->first, true);
  if (step == 7) set_trainable(*net->last, true);
}

std::vector<at::Tensor> values(const Uneven& net) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().clone());
  return result;
}

std::vector<at::Tensor> train_plainly(int world, bool accumulates) {
  auto net = seeded<Uneven>(3);
  const auto parameters = net->parameters();
  auto optimizer = adamw(parameters);
  for (int step = 0; step < kThawSteps; ++step) {
    change(net, step);
    clear_gradients(parameters);
    for (int part = accumulates ? 0 : 1; part < 2; ++part)
      for (int rank = 0; rank < world; ++rank)
        (loss_of(net(rows(2 * step + part, rank, world))) / world).backward();
    optimizer->step();
  }
  return values(net);
}

void expect_parity(const std::string& where, const std::vector<int>& hosts, const Options& options,
                   bool accumulates) {
  const auto world = static_cast<int>(hosts.size());
  const auto plain = train_plainly(world, accumulates);
  run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(3);
    change(net, 0);
    FullyShardedDataParallel fsdp(net, group, options);
    auto optimizer = adamw(fsdp.parameters());
    for (int step = 0; step < kThawSteps; ++step) {
      change(net, step);
      fsdp.zero_grad(true);
      if (accumulates) {
        const auto held = fsdp.no_sync();
        loss_of(fsdp(rows(2 * step, rank, world))).backward();
      }
      loss_of(fsdp(rows(2 * step + 1, rank, world))).backward();
      optimizer->step();
    }
    const auto whole = fsdp.summon_full_params();
    expect_close(values(net), plain, where);
  });
}

TEST(FsdpThaw, EqualsPlainTraining) {
  std::vector<Options> all;
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op,
                              ShardingStrategy::no_shard}) {
    for (const bool leaves : {false, true}) {
      auto& options = all.emplace_back();
      options.sharding_strategy = strategy;
      if (leaves) options.wrap_policy = wrap_leaves();
    }
  }
  all.push_back(all.front());
  all.back().partition = Partition::whole;
  all.push_back(all.front());
  all.back().overlap = Overlap::background;
  for (const auto& hosts :
       std::vector<std::vector<int>>{{0}, {0, 0}, {0, 1}, {0, 0, 0}, {0, 0, 1, 1}})
    for (size_t i = 0; i < all.size(); ++i)
      for (const bool accumulates : {false, true})
        expect_parity(::testing::PrintToString(hosts) + " " + std::to_string(i), hosts, all[i],
                      accumulates);
}

TEST(FsdpThaw, AnEvaluationInInferenceModeMayComeFirst) {
  std::vector<at::Tensor> straight;
  for (const bool evaluates : {false, true}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(3);
      set_trainable(*net->second, false);
      FullyShardedDataParallel fsdp(net, group, {.wrap_policy = wrap_leaves()});
      auto optimizer = adamw(fsdp.parameters());
      set_trainable(*net->second, true);
      for (int step = 0; step < 3; ++step) {
        if (evaluates) {
          const c10::InferenceMode inference;
          fsdp(rows(9));
        }
        fsdp.zero_grad(true);
        loss_of(fsdp(rows(step, rank, 2))).backward();
        optimizer->step();
      }
      const auto whole = fsdp.summon_full_params();
      if (rank == 0 && !evaluates) straight = values(net);
      if (evaluates) expect_close(values(net), straight, "with an evaluation");
    });
  }
}

TEST(FsdpThaw, OtherParametersOnTwoRanksAreNamed) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(3);
    set_trainable(*net->first, false);
    set_trainable(*net->second, false);
    FullyShardedDataParallel fsdp(net, group, {});
    set_trainable(rank == 0 ? *net->first : *net->second, true);
    loss_of(fsdp(rows(0, rank, 2))).backward();
  });
  expect_usage_errors(errors, "a change of requires_grad");
  expect_usage_errors(errors, "first.weight");
}

TEST(FsdpThaw, OnOneRankOnlyIsAnErrorOnAll) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(3);
    set_trainable(*net->first, false);
    FullyShardedDataParallel fsdp(net, group, {});
    if (rank == 1) set_trainable(*net->first, true);
    loss_of(fsdp(rows(0, rank, 2))).backward();
  });
  expect_usage_errors(errors, "the ranks disagree about a collective");
}

}  // namespace
