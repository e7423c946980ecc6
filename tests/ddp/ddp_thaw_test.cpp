#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"

// Parameters that are frozen at construction and thawed later, and the other way round.

namespace {

using namespace tessera;
using namespace tessera::testing;
using Options = DistributedDataParallelOptions;

constexpr int kSteps = 9;

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
  if (step == 2) set_trainable(*net->second, true);
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
  for (int step = 0; step < kSteps; ++step) {
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
    DistributedDataParallel ddp(net, group, options);
    auto optimizer = adamw(net->parameters());
    for (int step = 0; step < kSteps; ++step) {
      change(net, step);
      clear_gradients(net->parameters());
      if (accumulates) {
        const auto held = ddp.no_sync();
        loss_of(ddp(rows(2 * step, rank, world))).backward();
      }
      loss_of(ddp(rows(2 * step + 1, rank, world))).backward();
      optimizer->step();
    }
    ddp.wait();
    expect_close(values(net), plain, where);
  });
}

TEST(DdpThaw, EqualsPlainTraining) {
  Options small, unused, late, fixed, shared, both;
  small.first_bucket_mb = small.bucket_cap_mb.emplace(0.0001);
  unused.find_unused_parameters = true;
  late.overlap = Overlap::background;
  fixed.static_graph = both.static_graph = true;
  shared.share_parameters = both.share_parameters = true;
  both.overlap = Overlap::background;
  for (const auto& hosts :
       std::vector<std::vector<int>>{{0}, {0, 0}, {0, 1}, {0, 0, 0}, {0, 0, 1, 1}})
    for (const auto& options : {Options(), small, unused, late, fixed, shared, both})
      for (const bool accumulates : {false, true})
        expect_parity(::testing::PrintToString(hosts), hosts, options, accumulates);
}

TEST(DdpThaw, OnOneRankOnlyIsAnErrorOnAll) {
  for (const bool trainable : {false, true}) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(3);
      set_trainable(*net->second, !trainable);
      DistributedDataParallel ddp(net, group, {});
      if (rank == 1) set_trainable(*net->second, trainable);
      for (int step = 0; step < 2; ++step) loss_of(ddp(rows(step, rank, 2))).backward();
    });
    expect_usage_errors(errors, "rank");
  }
}

// A forward in evaluation mode is local, because one rank may make it alone.
TEST(DdpThaw, InAModuleThatTrainsInEvaluationModeIsAnErrorOnAll) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(3);
    set_trainable(*net->second, false);
    DistributedDataParallel ddp(net, group, {});
    net->eval();
    loss_of(ddp(rows(0, rank, 2))).backward();
    set_trainable(*net->second, true);
    loss_of(ddp(rows(1, rank, 2))).backward();
  });
  expect_usage_errors(errors, "parameter second.weight got a gradient and was frozen");
}

TEST(DdpThaw, OtherParametersOnTwoRanksAreNamed) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(3);
    set_trainable(*net->first, false);
    set_trainable(*net->second, false);
    DistributedDataParallel ddp(net, group, {});
    set_trainable(rank == 0 ? *net->first : *net->second, true);
    loss_of(ddp(rows(0, rank, 2))).backward();
  });
  expect_usage_errors(errors, "a change of requires_grad");
  expect_usage_errors(errors, "first.weight requires a gradient");
}

}  // namespace
