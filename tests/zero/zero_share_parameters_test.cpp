#include <chrono>
#include <map>
#include <optional>
#include <thread>

#include <fmt/format.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include "harness/temporary_folder.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/module_state_dict.h"
#include "tessera/safetensors.h"
#include "zero/zero_harness.h"

// Option share_parameters: the ranks of a host have one copy of the parameters.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

ZeroOptions shared(Partition partition = Partition::flat) {
  ZeroOptions options;
  options.partition = partition;
  options.share_parameters = true;
  return options;
}

/// Runs `train(net, zero, rank)` with and without the option, and compares the weights bit by bit.
template <class Net, class Train>
void expect_same_as_copies(const std::vector<int>& hosts, const OptimizerFactory& optimizer,
                           const ZeroOptions& options, const Train& train,
                           const std::function<void(Net&)>& prepare = {}) {
  auto plain = options;
  plain.share_parameters = false;
  run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
    // Rank 0's weights are everybody's.
    auto net = seeded<Net>(8 + rank), other = seeded<Net>(8 + rank);
    if (prepare) prepare(net), prepare(other);
    Zero ours(*net, group, optimizer, options), theirs(*other, group, optimizer, plain);
    expect_same_weights(net, other);
    train(net, ours, rank);
    train(other, theirs, rank);
    group.barrier();
    expect_same_weights(net, other);
    group.barrier();
  });
}

std::vector<int> one_host(int world) { return std::vector<int>(world, 0); }

TEST(ZeroShareParameters, TrainBitByBitAsWholeCopies) {
  const std::vector<OptimizerFactory> optimizers{
      factory("AdamW"), factory("SGD", {{"lr", 0.05}, {"momentum", 0.9}}),
      optimizer_factory<torch::optim::Adam>(torch::optim::AdamOptions(0.05))};
  for (const auto& optimizer : optimizers) {
    for (const auto partition : kPartitions) {
      for (const bool shard_gradients : {false, true}) {
        for (int world = 1; world <= 4; ++world) {
          auto options = shared(partition);
          options.shard_gradients = shard_gradients;
          options.bucket_cap_mb = 40.0 / (1 << 20);  // 10 floats: several buckets
          expect_same_as_copies<Uneven>(one_host(world), optimizer, options,
                                        [&](auto& net, Zero& zero, int rank) {
                                          for (int step = 0; step < 5; ++step) {
                                            loss_of(net(rows(step, rank, world))).backward();
                                            zero.step();
                                            zero.zero_grad();
                                          }
                                        });
        }
      }
    }
  }
}

TEST(ZeroShareParameters, OnSeveralHostsEachHasACopy) {
  const std::vector<std::vector<int>> placements{{0, 0, 1}, {0, 1, 1, 0}, {0, 1}, {0, 0, 1, 1}};
  for (const auto& hosts : placements) {
    const int world = static_cast<int>(hosts.size());
    for (const bool shard_gradients : {false, true}) {
      for (const auto partition : {Partition::flat, Partition::whole}) {
        auto options = shared(partition);
        options.shard_gradients = shard_gradients;
        expect_same_as_copies<Uneven>(hosts, factory("AdamW"), options,
                                      [&](auto& net, Zero& zero, int rank) {
                                        for (int step = 0; step < 3; ++step) {
                                          loss_of(net(rows(step, rank, world))).backward();
                                          if (step == 1) zero.clip_grad_norm_(0.1);
                                          zero.step();
                                          zero.zero_grad();
                                        }
                                      });
      }
    }
  }
}

/// More than the 64 KiB up to which a gather between hosts takes another way.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    a = register_module("a", torch::nn::Linear(3, 9001));
    b = register_module("b", torch::nn::Linear(9001, 2));
  }
  torch::Tensor forward(torch::Tensor x) { return b(torch::tanh(a(x))); }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Wide);

TEST(ZeroShareParameters, LargeGathersBetweenHosts) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 1}, {0, 1, 1, 0}}) {
    const int world = static_cast<int>(hosts.size());
    expect_same_as_copies<Wide>(hosts, factory("AdamW"), shared(),
                                [&](auto& net, Zero& zero, int rank) {
                                  for (int step = 0; step < 3; ++step) {
                                    loss_of(net(rows(step, rank, world))).backward();
                                    zero.step();
                                    zero.zero_grad();
                                  }
                                });
  }
}

TEST(ZeroShareParameters, TwoDtypesChannelsLastAndFrozenParameters) {
  for (int world = 2; world <= 3; ++world) {
    expect_same_as_copies<Mixed>(
        one_host(world), factory("AdamW"), shared(),
        [&](auto& net, Zero& zero, int rank) {
          for (int step = 0; step < 3; ++step) {
            loss_of(net(images(step, rank, world))).backward();
            zero.step();
            zero.zero_grad();
          }
        },
        [](Mixed& net) { net->conv->weight.requires_grad_(false); });
  }
}

TEST(ZeroShareParameters, AccumulatesClipsAndJoins) {
  for (int world = 1; world <= 4; ++world) {
    for (const bool shard_gradients : {false, true}) {
      auto options = shared();
      options.shard_gradients = shard_gradients;
      expect_same_as_copies<Uneven>(one_host(world), factory("SGD"), options,
                                    [&](auto& net, Zero& zero, int rank) {
                                      for (int step = 0; step < 3; ++step) {
                                        {
                                          const auto held = zero.no_sync();
                                          loss_of(net(rows(2 * step, rank, world))).backward();
                                        }
                                        loss_of(net(rows(2 * step + 1, rank, world))).backward();
                                        if (step > 0) zero.clip_grad_norm_(0.1);
                                        zero.step();
                                        zero.zero_grad();
                                      }
                                    });
      expect_same_as_copies<Uneven>(one_host(world), factory("AdamW"), options,
                                    [&](auto& net, Zero& zero, int rank) {
                                      join({zero}, {}, [&](JoinLoop& loop) {
                                        for (int step = 0; step < 2 + rank; ++step) {
                                          loop.next();
                                          loss_of(net(own_rows(step, rank))).backward();
                                          zero.step();
                                          zero.zero_grad();
                                        }
                                      });
                                    });
    }
  }
}

TEST(ZeroShareParameters, SurviveAChangeOfRequiresGradAndNewGroups) {
  expect_same_as_copies<Uneven>(one_host(2), factory("AdamW"), shared(),
                                [&](auto& net, Zero& zero, int rank) {
                                  for (int step = 0; step < 8; ++step) {
                                    if (step == 2) net->second->weight.requires_grad_(false);
                                    if (step == 5) net->second->weight.requires_grad_(true);
                                    loss_of(net(rows(step, rank, 2))).backward();
                                    zero.step();
                                    zero.zero_grad();
                                  }
                                });
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero({{named_parameters(*net->first), {}}}, group, factory("SGD"), shared());
    NamedParameters late;
    for (const auto& [name, tensor] : named_parameters(*net->last))
      late.emplace_back("late." + name, tensor);
    zero.add_param_group({late, {}});
    loss_of(net(rows(0, rank, 2))).backward();
    zero.step();
    EXPECT_THAT(thrown_by([&] {
                  const at::NoGradGuard no_grad;
                  net->last->bias.zero_();
                }),
                HasSubstr("writes to parameter late.bias"));
    group.barrier();
  });
}

/// Checks that all ranks read the same memory, and that each knows its part of the bytes.
TEST(ZeroShareParameters, AreOneCopyThatCountsOnceAHost) {
  const std::vector<std::vector<int>> placements{{0}, {0, 0}, {0, 0, 0}, {0, 0, 1}, {0, 1}};
  for (const auto& hosts : placements) {
    std::vector<const void*> places(hosts.size());
    std::vector<int64_t> bytes(hosts.size());
    run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      net->last->bias.requires_grad_(false);
      Zero zero(*net, group, factory("SGD"), shared());
      places[rank] = net->second->weight.data_ptr();
      bytes[rank] = zero.memory().parameters;
      group.barrier();
      if (rank == 0) {
        int64_t whole = 0;
        for (const auto& parameter : net->parameters()) whole += parameter.nbytes();
        std::map<int, int64_t> of_host;
        for (size_t r = 0; r < hosts.size(); ++r) of_host[hosts[r]] += bytes[r];
        for (const auto& [host, sum] : of_host) EXPECT_EQ(sum, whole) << "host " << host;
        for (size_t r = 1; r < hosts.size(); ++r)
          EXPECT_EQ(places[r] == places[0], hosts[r] == hosts[0]) << "rank " << r;
      }
      group.barrier();
    });
  }
}

TEST(ZeroShareParameters, TakeNoMoreCollectivesThanWholeCopies) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    const auto traffic = [&](bool share, bool clip) {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("AdamW"), {.share_parameters = share});
      loss_of(net(rows(0, rank, 2))).backward();
      group.reset_stats();
      if (clip) zero.clip_grad_norm_(0.1);
      zero.step();
      return group.stats();
    };
    for (const bool clip : {false, true}) {
      const auto whole = traffic(false, clip), once = traffic(true, clip);
      // After clipping no reduction separates reads from the update.
      EXPECT_EQ(once.calls(), whole.calls() + (clip ? 1 : 0));
      EXPECT_EQ(once.barrier.calls, clip ? 1u : 0u);
      EXPECT_EQ(once.all_gather.calls, whole.all_gather.calls);
      EXPECT_EQ(once.all_gather.bytes_sent, whole.all_gather.bytes_sent);
      EXPECT_EQ(once.reduce_scatter.calls, 1u);
      EXPECT_EQ(once.reduce_scatter.bytes_sent, whole.reduce_scatter.bytes_sent);
    }
  });
}

/// The update must wait for a rank that still reads, although its gradients are reduced already.
TEST(ZeroShareParameters, AnUpdateWaitsForRanksThatRead) {
  for (const bool shard_gradients : {false, true}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      auto options = shared();
      options.shard_gradients = shard_gradients;
      Zero zero(*net, group, factory("SGD", {{"lr", 1.0}}), options);
      const auto before = copies(net->parameters());
      loss_of(net(rows(0, rank, 2))).backward();
      if (!shard_gradients) zero.clip_grad_norm_(0.1);
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        const auto now = copies(net->parameters());
        for (size_t i = 0; i < now.size(); ++i) EXPECT_TRUE(at::equal(now[i], before[i])) << i;
      }
      zero.step();
      EXPECT_FALSE(at::equal(net->first->weight, before[0]));
      group.barrier();
    });
  }
}

TEST(ZeroShareParameters, RefuseWritesThatWouldBeEveryRanks) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    net->last->bias.requires_grad_(false);
    auto zero = std::make_unique<Zero>(*net, group, factory("SGD"), shared());
    const auto before = copies(net->parameters());
    const auto refused = [&](const std::string& name, const std::function<void()>& write) {
      EXPECT_THAT(thrown_by([&] {
                    const at::NoGradGuard no_grad;
                    write();
                  }),
                  AllOf(HasSubstr(fmt::format("rank {}: ", rank)),
                        HasSubstr("writes to parameter " + name), HasSubstr("with_shared_write")));
    };
    refused("scale", [&] { net->scale.fill_(2); });
    refused("second.weight", [&] { net->second->weight.detach()[3].add_(1); });
    refused("last.bias", [&] { torch::nn::init::zeros_(net->last->bias); });
    refused("scale", [&] { load_state_dict(*net, state_dict(*seeded<Uneven>(9))); });
    loss_of(net(rows(0, rank, 2))).backward();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    refused("scale", [&] { sgd.step(); });
    group.barrier();
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(at::equal(net->parameters()[i], before[i])) << i;
    zero->step();
    const auto trained = copies({net->scale});
    group.barrier();
    // The memory is still that of all ranks.
    zero.reset();
    EXPECT_THAT(thrown_by([&] {
                  const at::NoGradGuard no_grad;
                  net->scale.add_(1);
                }),
                HasSubstr("after the object that shares it was destroyed"));
    EXPECT_TRUE(at::equal(net->scale, trained[0])) << "it can be read";
    group.barrier();
  });
}

TEST(ZeroShareParameters, ALaterWrapperThatWouldWriteThemIsTheSameErrorOnEveryRank) {
  const std::vector<std::function<void(ProcessGroup, Uneven)>> wrappers{
      [](ProcessGroup group, Uneven net) { DistributedDataParallel<Uneven> ddp(net, group); },
      [](ProcessGroup group, Uneven net) {
        DistributedOptimizer optimizer(*net, group, factory("SGD"), {.reduce_method = "mean"});
      },
      [](ProcessGroup group, Uneven net) { FullyShardedDataParallel<Uneven> fsdp(net, group); },
      [](ProcessGroup group, Uneven net) {
        Zero zero(*net, group, factory("SGD"), {.parameters_as_bucket_view = false});
      }};
  for (const auto& wrap : wrappers) {
    const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int) {
      auto net = seeded<Uneven>(8);
      std::make_unique<Zero>(*net, group, factory("SGD"), shared()).reset();
      wrap(group, net);
    });
    expect_usage_errors(errors, "after the object that shares it was destroyed");
  }
  run_ranks(3, [&](ProcessGroup group, int rank) {  // this one gives them other memory
    auto net = seeded<Uneven>(8), plain = seeded<Uneven>(8);
    std::make_unique<Zero>(*net, group, factory("SGD"), shared()).reset();
    for (auto model : {net, plain}) {
      Zero zero(*model, group, factory("SGD"));
      loss_of(model->forward(rows(0, rank, 3))).backward();
      zero.step();
    }
    expect_same_weights(net, plain);
  });
}

TEST(ZeroShareParameters, WithSharedWriteWritesOnceAHost) {
  for (const std::vector<int>& hosts : {std::vector<int>{0}, {0, 0, 0}, {0, 0, 1}, {0, 1}}) {
    run_ranks_on(hosts, [](ProcessGroup group, int) {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("SGD"), shared());
      auto expected = copies(net->parameters());
      for (auto& tensor : expected) tensor.add_(1);
      group.barrier();
      zero.with_shared_write([&] {
        for (auto& parameter : net->parameters()) parameter.add_(1);
      });
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::equal(net->parameters()[i], expected[i])) << i;
      group.barrier();
      const auto saved = state_dict(*seeded<Uneven>(9));
      zero.with_shared_write([&] { load_state_dict(*net, saved); });
      expect_same_weights(net, seeded<Uneven>(9));
      group.barrier();
    });
  }
}

TEST(ZeroShareParameters, AStateDictIsLoadedFromAFile) {
  TemporaryFolder folder;
  const auto path = folder.path("model.safetensors");
  save_safetensors(path, state_dict(*seeded<Uneven>(9)));
  run_ranks(2, [&](ProcessGroup group, int) {
    auto net = seeded<Uneven>(8);
    Zero optimizer(*net, group, factory("SGD"), shared());
    // [documented]
    optimizer.with_shared_write([&] { tessera::load_state_dict(*net, path); });
    // [end]
    expect_same_weights(net, seeded<Uneven>(9));
    group.barrier();
  });
}

TEST(ZeroShareParameters, TorchLoadIsAnErrorThatNamesLoadStateDict) {
  TemporaryFolder folder;
  const auto path = folder.path("model.pt");
  torch::save(seeded<Uneven>(9), path);
  const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("SGD"), shared());
    EXPECT_THAT(thrown_by([&] { torch::load(net, path); }),
                HasSubstr("expected tessera::load_state_dict(*net, path) inside"));
    expect_same_weights(net, seeded<Uneven>(8));
    group.barrier();
    // It would give the first rank of the host parameters of its own.
    zero.with_shared_write([&] { torch::load(net, path); });
  });
  expect_usage_errors(errors, "aten::set_ (as in torch::load) replaces the memory of parameter");
}

TEST(ZeroShareParameters, WithSharedWriteSendsBuffersAndInvalidatesGraphs) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = std::make_shared<WithBuffer>();
    Zero zero(*net, group, factory("SGD"), shared());
    auto y = net->forward(torch::ones({2}).requires_grad_());
    zero.with_shared_write([&] {
      net->weight.fill_(3);
      net->mean.fill_(5);
    });
    EXPECT_EQ(net->weight[0].item<float>(), 3);
    EXPECT_EQ(net->mean[1].item<float>(), 5) << "rank " << rank;
    EXPECT_THROW(y.sum().backward(), c10::Error) << "the graph is of former values";
    group.barrier();
  });
}

TEST(ZeroShareParameters, WithSharedWriteThatThrowsIsAnErrorOnEveryRank) {
  const auto errors = run_ranks_catching(2, [](ProcessGroup group, int) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("SGD"), shared());
    zero.with_shared_write([] { throw std::runtime_error("no such file"); });
  });
  expect_usage_errors(errors, "no such file");
}

TEST(ZeroShareParameters, AWriteToShardsIsPublishedByTheGather) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("SGD"), shared());
    zero.wait_for_readers();
    for (const auto& shard : zero.shards()) shard.tensor.detach().fill_(rank + 1);
    zero.gather_parameters();
    float sum = 0;
    for (const auto& parameter : net->parameters()) sum += parameter.sum().item<float>();
    int64_t own[2] = {0, 0};
    for (const auto& ranges : {zero.partition()}) {
      for (int r = 0; r < 2; ++r)
        for (const auto& range : ranges[r]) own[r] += range.numel;
    }
    EXPECT_EQ(sum, static_cast<float>(own[0] + 2 * own[1]));
    group.barrier();
  });
}

TEST(ZeroShareParameters, RefusesOptionsThatDoNotGoWithIt) {
  const auto message = [](ZeroOptions options, const OptimizerFactory& optimizer) {
    options.share_parameters = true;
    return thrown_by([&] {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, ProcessGroup(), optimizer, options);
    });
  };
  const auto adamw = factory("AdamW");
  EXPECT_THAT(message({.parameters_as_bucket_view = false}, adamw),
              HasSubstr("rank 0: option share_parameters needs parameters_as_bucket_view"));
  EXPECT_THAT(message({.partition = Partition::whole},
                      optimizer_factory<torch::optim::LBFGS>(torch::optim::LBFGSOptions())),
              HasSubstr("option share_parameters needs an optimizer"));
}

TEST(ZeroShareParameters, RanksOfAHostWithoutSharedMemoryAreAnErrorOnEveryRank) {
  ProcessGroupOptions gloo;
  gloo.backend = Backend::Gloo;
  const auto errors = run_ranks_catching(2,
                                         [](ProcessGroup group, int) {
                                           auto net = seeded<Uneven>(8);
                                           Zero zero(*net, group, factory("SGD"), shared());
                                         },
                                         gloo, {0, 0});
  expect_usage_errors(
      errors, "option share_parameters needs memory that the 2 ranks of this host can share");
}

}  // namespace
