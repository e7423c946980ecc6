#include <array>
#include <sstream>

#include <torch/optim/adam.h>
#include <torch/serialize.h>

#include "harness/temporary_folder.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/safetensors.h"
#include "tessera/step/replicas.h"
#include "zero/zero_harness.h"

// Overlap::background: step() returns before the other ranks' parameters have arrived.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

using Hosts = std::vector<int>;

ZeroOptions background(bool value, bool early, Partition partition = Partition::flat,
                       WireFormat gradients = WireFormat::float32) {
  return {.partition = partition,
          .overlap = value   ? Overlap::background
                     : early ? Overlap::backward
                             : Overlap::none,
          .bucket_cap_mb = 0.0002,
          .wire = {.gradients = gradients}};
}

void run_backward(Uneven& net, int batch, int rank, int world) {
  loss_of(net(rows(batch, rank, world))).backward();
}

bool has_memory(const torch::Tensor& tensor) {
  return compat::unchecked_data_ptr(tensor.storage().unsafeGetStorageImpl()).get() != nullptr;
}

/// One step on all ranks, whose gathers nothing has waited for.
struct Stepped {
  Stepped(const ProcessGroup& group, int rank, ZeroOptions options) {
    zero = std::make_unique<Zero>(*net, group, factory("AdamW"), options);
    run_backward(net, 0, rank, group.size());
    zero->step();
  }
  Uneven net = seeded<Uneven>(8);
  std::unique_ptr<Zero> zero;
};

/// Compares the weights of a training in the background with those of one that waits.
void expect_same_training(const Hosts& hosts, const OptimizerFactory& optimizer, bool early,
                          Partition partition, WireFormat gradients = WireFormat::float32) {
  const int world = static_cast<int>(hosts.size());
  run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
    Zero later(*net, group, optimizer, background(true, early, partition, gradients));
    Zero at_once(*other, group, optimizer, background(false, early, partition, gradients));
    const auto step = [&](Uneven& model, Zero& zero, int i) {
      {
        const auto scope = zero.no_sync();
        run_backward(model, 2 * i, rank, world);
      }
      run_backward(model, 2 * i + 1, rank, world);
      if (i % 2 == 0) zero.clip_grad_norm_(0.1);
      zero.step();
      zero.zero_grad();
    };
    for (int i = 0; i < 5; ++i) {
      step(net, later, i);
      step(other, at_once, i);
    }
    expect_same_weights(net, other);
  });
}

TEST(ZeroBackground, TrainsBitByBitAsAStepThatWaits) {
  for (const Hosts& hosts : {Hosts{0, 1}, {0, 0, 1}, {0, 1, 0, 1}, {0, 0, 0}}) {
    for (const auto& optimizer : {factory("AdamW"), optimizer_factory<torch::optim::Adam>(
                                                        torch::optim::AdamOptions(0.05))}) {
      for (const bool early : {false, true})
        for (const auto partition : kPartitions)
          expect_same_training(hosts, optimizer, early, partition);
    }
  }
}

TEST(ZeroBackground, ParametersTravelExactlyBesideRoundedGradients) {
  for (const Hosts& hosts : {Hosts{0, 1}, {0, 0, 1}, {0, 1, 0, 1}}) {
    for (const auto format : {WireFormat::bfloat16, WireFormat::int8}) {
      // Rounded in the same blocks: those of the buckets of a reduction within backward.
      expect_same_training(hosts, factory("AdamW"), true, Partition::flat, format);
    }
  }
}

TEST(ZeroBackground, AParameterHasNoMemoryUntilItIsUsed) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const Stepped other(group, rank, background(false, true));
    const Stepped stepped(group, rank, background(true, true));
    const auto weight = stepped.net->first->weight;
    EXPECT_FALSE(has_memory(weight));
    EXPECT_TRUE(torch::equal(weight, other.net->first->weight));
    EXPECT_TRUE(has_memory(weight));
    stepped.zero->wait();
    for (const auto& p : stepped.net->parameters()) EXPECT_TRUE(has_memory(p));
    expect_same_weights(stepped.net, other.net);
  });
}

TEST(ZeroBackground, AnAliasFromBeforeTheStepWaitsToo) {
  run_ranks_on({0, 1, 1}, [](ProcessGroup group, int rank) {
    const Stepped other(group, rank, background(false, true));
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), background(true, true));
    const auto detached = net->last->weight.detach();
    const auto row = [&] {
      torch::NoGradGuard no_grad;
      return net->last->weight[1];
    }();
    run_backward(net, 0, rank, group.size());
    zero.step();
    EXPECT_TRUE(torch::equal(row, other.net->last->weight[1]));
    EXPECT_TRUE(torch::equal(detached, other.net->last->weight));
  });
}

/// What other components do with parameters directly after a step.
TEST(ZeroBackground, CollectivesAndFilesWait) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const Stepped other(group, rank, background(false, true));
    const auto stepped = [&] { return Stepped(group, rank, background(true, true)); };
    {
      const auto s = stepped();
      auto sum = s.net->last->weight.detach();
      group.all_reduce(sum, 0.5);
      EXPECT_TRUE(torch::equal(sum, other.net->last->weight));
    }
    {
      const auto s = stepped();
      std::vector<std::pair<std::string, torch::Tensor>> replicas;
      for (const auto& p : s.net->named_parameters()) replicas.emplace_back(p.key(), p.value());
      check_replicas(replicas, group);
    }
    {
      const auto s = stepped();
      const TemporaryFolder folder;
      const auto path = folder.path("w.safetensors");
      save_safetensors(path, {{"w", s.net->last->weight}});
      EXPECT_TRUE(torch::equal(SafetensorsFile(path).load("w"), other.net->last->weight));
    }
    {
      auto s = stepped();
      std::stringstream archive;
      EXPECT_ANY_THROW(torch::save(s.net, archive));  // libtorch writes storages without operators
      s.zero->wait();
      archive = {};
      torch::save(s.net, archive);
      auto loaded = seeded<Uneven>(1);
      torch::load(loaded, archive);
      expect_same_weights(loaded, other.net);
    }
    {
      const auto s = stepped();
      for (const auto& shard : s.zero->shards())
        EXPECT_TRUE(shard.numel == 0 || has_memory(shard.tensor));
    }
  });
}

TEST(ZeroBackground, TheOptimizerMayEndWhileParametersArrive) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const Stepped other(group, rank, background(false, true));
    Stepped stepped(group, rank, background(true, true));
    stepped.zero.reset();
    EXPECT_TRUE(has_memory(stepped.net->first->weight));
    expect_same_weights(stepped.net, other.net);
  });
}

TEST(ZeroBackground, MovesTheSameBytes) {
  run_ranks_on({0, 1, 1}, [](ProcessGroup group, int rank) {
    const auto gathered = [&](bool value) {
      Stepped stepped(group, rank, background(value, true));
      group.reset_stats();
      run_backward(stepped.net, 1, rank, group.size());
      stepped.zero->step();
      stepped.zero->wait();
      const auto stats = group.stats();
      return std::array<uint64_t, 3>{stats.all_gather.calls, stats.all_gather.bytes_received,
                                     stats.reduce_scatter.bytes_received};
    };
    EXPECT_EQ(gathered(true), gathered(false));
  });
}

TEST(ZeroBackground, OverlapsLessWhereItCannotWork) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const auto waits = [&](ZeroOptions options) {
      options.overlap = Overlap::background;
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("AdamW"), options);
      loss_of(net(rows(0, rank, 2))).backward();
      zero.step();
      return has_memory(net->last->weight);
    };
    EXPECT_FALSE(waits({}));
    EXPECT_TRUE(waits({.parameters_as_bucket_view = false}));
    EXPECT_TRUE(waits({.wire = {.parameters = WireFormat::int8}}));
  });
}

}  // namespace
