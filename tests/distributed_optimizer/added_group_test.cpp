#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim/optimizer_state.h"

// add_param_group() of DistributedOptimizer.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;
using Options = DistributedOptimizerOptions;
using Group = DistributedOptimizer::Group;

constexpr int kSteps = 8, kAdded = 3;

NamedParameters parameters_of(const Uneven& net, bool late) {
  NamedParameters parameters;
  for (const auto& item : named_parameters(*net))
    if ((item.first.rfind("second", 0) == 0) == late) parameters.push_back(item);
  return parameters;
}

std::vector<at::Tensor> tensors_of(const NamedParameters& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& item : parameters) tensors.push_back(item.second);
  return tensors;
}

/// When the second layer gets its group in step kAdded.
enum class When { before_backward, before_step };

/// DistributedDataParallel, whose bits are those of DistributedOptimizer, with a plain optimizer.
void train_with_ddp(Uneven& net, const ProcessGroup& group, When when, double factor) {
  const int rank = group.rank(), world = group.size();
  DistributedDataParallel ddp(net, group);
  auto optimizer = adamw(tensors_of(parameters_of(net, false)));
  const auto add = [&] {
    torch::optim::OptimizerParamGroup late(tensors_of(parameters_of(net, true)),
                                           optimizer->defaults().clone());
    late.options().set_lr(0.01);
    add_param_group(*optimizer, late);
  };
  for (int step = 0; step < kSteps; ++step) {
    clear_gradients(net->parameters());
    if (step == kAdded && when == When::before_backward) add();
    (loss_of(ddp(rows(step, rank, world))) * factor).backward();
    if (step == kAdded && when == When::before_step) add();
    optimizer->step();
  }
}

void train(Uneven& net, const ProcessGroup& group, When when, const Options& options) {
  const int rank = group.rank(), world = group.size();
  DistributedOptimizer optimizer({{parameters_of(net, false), {}, group}}, adamw_factory(),
                                 options);
  for (int step = 0; step < kSteps; ++step) {
    const auto add = [&] {
      optimizer.add_param_group({parameters_of(net, true), {{"lr", 0.01}}, group});
    };
    clear_gradients(net->parameters());
    if (step == kAdded && when == When::before_backward) add();
    optimizer.backward(loss_of(net(rows(step, rank, world))));
    if (step == kAdded && when == When::before_step) add();
    optimizer.step();
  }
}

TEST(DistributedAddedGroup, HasTheBitsOfDataParallelTraining) {
  for (int world = 1; world <= 4; ++world) {
    for (const auto when : {When::before_backward, When::before_step}) {
      for (const char* method : {"mean", "sum"}) {
        for (const bool packs : {false, true}) {
          // 4 = 2 * 2: sums then have the bits of means of multiples.
          const double factor = std::string(method) == "sum" ? world : 1;
          if (factor == 3) continue;
          run_ranks(world, [&](ProcessGroup group, int) {
            auto net = seeded<Uneven>(1), expected = seeded<Uneven>(1);
            train_with_ddp(expected, group, when, factor);
            train(net, group, when,
                  {.reduce_method = method,
                   .param_pack = packs,
                   .param_pack_thd = 59,
                   .buffers = BufferSync::none});
            expect_same_weights(net, expected);
          });
        }
      }
    }
  }
}

// What construction does for the other groups.
TEST(DistributedAddedGroup, HasTheParametersOfRank0) {
  run_ranks(3, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1 + rank);
    DistributedOptimizer optimizer({{parameters_of(net, false), {}, group}}, adamw_factory(),
                                   {.reduce_method = "mean", .buffers = BufferSync::none});
    optimizer.add_param_group({parameters_of(net, true), {}, group});
    expect_same_weights(net, seeded<Uneven>(1));
  });
}

TEST(DistributedAddedGroup, IsResumedWithBothGroups) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1), resumed = seeded<Uneven>(1);
    const Options options{.reduce_method = "mean", .buffers = BufferSync::none};
    DistributedOptimizer optimizer({{parameters_of(net, false), {}, group}}, adamw_factory(),
                                   options);
    const auto step = [&](Uneven& model, DistributedOptimizer& trains, int number) {
      clear_gradients(model->parameters());
      trains.backward(loss_of(model(rows(number, rank, 2))));
      trains.step();
    };
    for (int number = 0; number < 2; ++number) step(net, optimizer, number);
    const auto moments = optimizer.state_dict().state.at("last.weight");
    optimizer.add_param_group({parameters_of(net, true), {{"lr", 0.01}}, group});
    EXPECT_TRUE(at::equal(optimizer.state_dict().state.at("last.weight").tensors.at("exp_avg"),
                          moments.tensors.at("exp_avg")));
    for (int number = 2; number < 4; ++number) step(net, optimizer, number);
    DistributedOptimizer both(
        {{parameters_of(resumed, false), {}, group}, {parameters_of(resumed, true), {}, group}},
        adamw_factory(), options);
    load_state_dict(*resumed, state_dict(*net));
    both.load_state_dict(optimizer.state_dict());
    for (int number = 4; number < 6; ++number) {
      step(net, optimizer, number);
      step(resumed, both, number);
    }
    expect_same_weights(net, resumed);
  });
}

/// Adds a group on 2 ranks, which must fail on both.
void expect_errors(
    const std::function<void(DistributedOptimizer&, Uneven&, ProcessGroup, int)>& add,
    const std::string& text) {
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    DistributedOptimizer optimizer({{parameters_of(net, false), {}, group}}, adamw_factory(),
                                   {.reduce_method = "mean", .buffers = BufferSync::none});
    add(optimizer, net, group, rank);
  });
  expect_usage_errors(errors, text);
}

TEST(DistributedAddedGroup, ErrorsAreOnEveryRank) {
  expect_errors(
      [](auto& optimizer, auto& net, auto group, int rank) {
        auto parameters = parameters_of(net, true);
        if (rank == 1) parameters.push_back(parameters_of(net, false)[0]);
        optimizer.add_param_group({parameters, {}, group});
      },
      "group 1, parameter scale: already in an earlier group as scale");
  expect_errors(
      [](auto& optimizer, auto& net, auto group, int rank) {
        auto parameters = parameters_of(net, true);
        if (rank == 1) parameters.pop_back();
        optimizer.add_param_group({parameters, {}, group});
      },
      "second.bias");
  expect_errors(
      [](auto& optimizer, auto& net, auto group, int rank) {
        optimizer.add_param_group({parameters_of(net, true), {{"lr", rank + 1.0}}, group});
      },
      "lr 2");
  expect_errors(
      [](auto& optimizer, auto& net, auto group, int) {
        const auto held = optimizer.no_sync();
        optimizer.add_param_group({parameters_of(net, true), {}, group});
      },
      "add_param_group() was called while no_sync() holds");
}

}  // namespace
