// Option wire of each wrapper: what travels between hosts is rounded. The ranks are threads of one
// process, so their hosts are numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/thrown_by.h"
#include "placements/wrappers.h"
#include "tessera/step/grad_scaler.h"

namespace tessera::testing {
namespace {

using Hosts = std::vector<int>;
using ::testing::HasSubstr;

const std::vector<Hosts> kWirePlacements{{0, 1}, {0, 0, 1}, {0, 1, 0, 1}};
constexpr WireFormat kEncodedFormats[] = {WireFormat::bfloat16, WireFormat::int8};

std::vector<Tensors> train_all(const Hosts& hosts, const NamedTrain& wrapper,
                               const Training& training) {
  std::vector<Tensors> all(hosts.size());
  run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
    all[rank] = wrapper.train(group, rank, training);
  });
  return all;
}

double largest_difference(const Tensors& a, const Tensors& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, (a[i] - b[i]).abs().max().item<double>());
  return largest;
}

void expect_near_float32(const Training& training, double tolerance) {
  for (const auto& hosts : kWirePlacements) {
    for (const auto& wrapper : all_trainings(static_cast<int>(hosts.size()))) {
      if (!wrapper.gathers && training.wire.parameters != WireFormat::float32) continue;
      SCOPED_TRACE(wrapper.name + " on " + ::testing::PrintToString(hosts) + ", " +
                   to_string(training.wire));
      const auto exact = train_all(hosts, wrapper, {.steps = training.steps});
      const auto found = train_all(hosts, wrapper, training);
      for (const auto& rank : found) EXPECT_EQ(largest_difference(rank, found[0]), 0);
      const double difference = largest_difference(found[0], exact[0]);
      // The shard groups of hybrid sharding may lie within the hosts.
      if (wrapper.name != "fsdp, hybrid") EXPECT_GT(difference, 0);
      EXPECT_LE(difference, tolerance);
      if (hosts.size() > 2) continue;
      const auto again = train_all(hosts, wrapper, training);
      EXPECT_EQ(largest_difference(again[0], found[0]), 0) << "another time";
    }
  }
}

// A step of AdamW changes a weight by about its learning rate, 0.05, whatever its gradient is.
TEST(WireOfWrappers, RoundedGradientsTrainNearlyTheSame) {
  for (const auto format : kEncodedFormats)
    expect_near_float32({.wire = {.gradients = format}}, 0.1);
}

TEST(WireOfWrappers, RoundedParametersTrainNearlyTheSame) {
  for (const auto format : kEncodedFormats) {
    expect_near_float32({.wire = {.parameters = format}}, 0.1);
    expect_near_float32({.wire = {.gradients = format, .parameters = format}}, 0.1);
  }
}

TEST(WireOfWrappers, HasNoEffectOnOneHost) {
  const Hosts hosts{0, 0};
  for (const auto& wrapper : all_trainings(2)) {
    const WireOptions wire{.gradients = WireFormat::int8,
                           .parameters = wrapper.gathers ? WireFormat::int8 : WireFormat::float32};
    EXPECT_EQ(largest_difference(train_all(hosts, wrapper, {.wire = wire})[0],
                                 train_all(hosts, wrapper, {})[0]),
              0);
  }
}

TEST(WireOfWrappers, AJoinWithRoundedValuesEnds) {
  for (const auto& hosts : {Hosts{0, 1}, Hosts{0, 0, 1}}) {
    for (const auto& wrapper : all_trainings(static_cast<int>(hosts.size()))) {
      if (wrapper.name == "distributed optimizer") continue;
      SCOPED_TRACE(wrapper.name);
      const auto found = train_all(
          hosts, wrapper, {.wire = {.gradients = WireFormat::int8}, .steps = 2, .joins = true});
      for (const auto& rank : found) EXPECT_EQ(largest_difference(rank, found[0]), 0);
    }
  }
}

/// Zero's shards are exact in memory that the other ranks do not see; its replicas are equal.
TEST(WireOfWrappers, AnOwnerOfZeroKeepsWhatRoundingTook) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    ZeroRedundancyOptimizer zero(*net, group, adamw_factory(),
                                 {.wire = {.parameters = WireFormat::int8}});
    auto lacks = [&] {
      double largest = 0;
      for (const auto& slice : zero.state_slices()) {
        const auto found = slice.state.tensors.find("wire_residual");
        if (found != slice.state.tensors.end())
          largest = std::max(largest, found->second.abs().max().item<double>());
      }
      return largest;
    };
    EXPECT_EQ(lacks(), 0);
    for (int step = 0; step < 3; ++step) {
      zero.zero_grad();
      loss_of(net(own_rows(step, rank))).backward();
      zero.step();
    }
    EXPECT_GT(lacks(), 0);
    EXPECT_LT(lacks(), 0.05 / 127);  // half a code of a step's change
    zero.gather_parameters();
    EXPECT_EQ(lacks(), 0);
  });
}

/// Two halves with a checkpoint's slices between them have the bits of one run.
TEST(WireOfWrappers, StateSlicesContinueZeroBitByBit) {
  for (const auto& hosts : {Hosts{0, 1}, Hosts{0, 0, 1}}) {
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      const ZeroRedundancyOptimizerOptions options{.wire = {.parameters = WireFormat::int8}};
      const auto train_on = [&](Uneven& net, ZeroRedundancyOptimizer& zero, int first, int end) {
        for (int step = first; step < end; ++step) {
          zero.zero_grad();
          loss_of(net(own_rows(step, rank))).backward();
          zero.step();
        }
      };
      auto net = seeded<Uneven>(8), other = seeded<Uneven>(9);
      ZeroRedundancyOptimizer zero(*net, group, adamw_factory(), options);
      train_on(net, zero, 0, 3);
      auto slices = zero.state_slices();
      for (auto& slice : slices)
        for (auto& [name, tensor] : slice.state.tensors) tensor = tensor.clone();
      ZeroRedundancyOptimizer resumed(*other, group, adamw_factory(), options);
      {
        const at::NoGradGuard no_grad;
        for (size_t i = 0; i < net->parameters().size(); ++i)
          other->parameters()[i].copy_(net->parameters()[i]);
      }
      resumed.load_state_slices(slices);
      train_on(net, zero, 3, 6);
      train_on(other, resumed, 3, 6);
      EXPECT_EQ(largest_difference(copies(other->parameters()), copies(net->parameters())), 0);
    });
  }
}

/// docs/hosts.md
TEST(WireOfWrappers, TheDocumentedLinesTrain) {
  run_ranks_on({0, 1}, [](ProcessGroup world, int rank) {
    auto net = seeded<Uneven>(8);
    // [documented]
    tessera::FullyShardedDataParallel fsdp(net, world,
                                           {.wire = {.gradients = tessera::WireFormat::int8,
                                                     .parameters = tessera::WireFormat::bfloat16}});
    // [end]
    loss_of(fsdp(own_rows(0, rank))).backward();
    EXPECT_TRUE(fsdp.parameters()[0].grad().defined());
    GradScaler scaler;
    const bool skip = true;
    // [documented]
    const double scale = scaler.scale();
    scaler.update(skip);
    fsdp.end_step({.used = !skip, .scale = scaler.scale() / scale});
    // [end]
    EXPECT_LT(scaler.scale(), scale);
  });
}

void expect_refused(const std::function<void(ProcessGroup group)>& build, const std::string& text) {
  for (const auto& hosts : {Hosts{0, 0}, Hosts{0, 1}})
    for (const auto& error : run_ranks_catching(
             2, [&](ProcessGroup group, int) { build(group); }, {}, hosts))
      EXPECT_THAT(message_of(error), HasSubstr(text));
}

TEST(WireOfWrappers, ImpossibleOptionsAreErrorsOnAnyPlacement) {
  constexpr auto kInt8 = WireFormat::int8;
  expect_refused(
      [](ProcessGroup group) {
        DistributedDataParallel ddp(seeded<Uneven>(1), group, {.wire = {.parameters = kInt8}});
      },
      "DistributedDataParallel: rank 0: option wire.parameters is int8, but every rank updates");
  expect_refused(
      [](ProcessGroup group) {
        DistributedDataParallel ddp(seeded<Mixed>(1), group, {.wire = {.gradients = kInt8}});
      },
      "parameter head.weight has dtype Double; expected float32, bfloat16 or float16");
  expect_refused(
      [](ProcessGroup group) {
        auto net = seeded<Uneven>(1);
        ZeroRedundancyOptimizer zero(
            *net, group, adamw_factory(),
            {.parameters_as_bucket_view = false, .wire = {.parameters = kInt8}});
      },
      "option wire.parameters is int8, and it needs parameters_as_bucket_view");
  expect_refused(
      [](ProcessGroup group) {
        auto net = seeded<Uneven>(1);
        DistributedOptimizer optimizer(*net, group, adamw_factory(),
                                       {.reduce_method = "mean", .wire = {.parameters = kInt8}});
      },
      "DistributedOptimizer: rank 0: option wire.parameters is int8");
  expect_refused(
      [](ProcessGroup group) {
        FullyShardedDataParallel fsdp(seeded<Mixed>(1), group, {.wire = {.gradients = kInt8}});
      },
      "FullyShardedDataParallel: rank 0: option wire (gradients int8, parameters float32): "
      "parameter head.weight has dtype Double");
}

}  // namespace
}  // namespace tessera::testing
