#include <algorithm>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "harness/training.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim.h"
#include "tessera/safetensors.h"
#include "tessera/safetensors_weights.h"
#include "tessera/weights/weights.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

class FsdpState : public ::testing::Test {
 protected:
  FsdpState() {
    std::string name = (fs::temp_directory_path() / "tessera-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = name;
  }
  ~FsdpState() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  fs::path folder_;
};

void flip_last_byte(const std::string& path) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(-1, std::ios::end);
  const char last = static_cast<char>(file.get() ^ 1);
  file.seekp(-1, std::ios::end);
  file.put(last);
}

std::map<std::string, at::Tensor> by_name(
    const std::vector<std::pair<std::string, at::Tensor>>& list) {
  return {list.begin(), list.end()};
}

void expect_same(const OptimizerStateDict& a, const OptimizerStateDict& b, double tolerance = 0) {
  ASSERT_EQ(a.state.size(), b.state.size());
  for (const auto& [name, state] : a.state) {
    for (const auto& [key, tensor] : state.tensors) {
      const auto& other = b.state.at(name).tensors.at(key);
      ASSERT_TRUE(tolerance > 0 ? at::allclose(tensor, other, tolerance, tolerance)
                                : at::equal(tensor, other))
          << name << " " << key;
    }
  }
}

TEST_F(FsdpState, WeightsAndOptimizerGoFromAnyWorldToAnyOther) {
  // Without batch statistics the result does not depend on the world size.
  const auto make = [] {
    auto net = seeded<ResNet>(3);
    net->eval();
    return net;
  };
  auto plain = make();
  auto reference = adamw(plain->parameters());
  train(plain, *reference, 0, 3);
  const auto expected_state = state_dict(*reference, named_parameters(*plain));
  for (int from = 1; from <= 4; ++from) {
    OptimizerStateDict saved;
    run_ranks(from, [&](ProcessGroup group, int rank) {
      auto net = make();
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      auto optimizer = adamw(fsdp.parameters());
      train(fsdp, *optimizer, 0, 3, rank, from);
      fsdp.save_state_dict(path("full.safetensors"));
      fsdp.save_sharded_state_dict(path("sharded"));
      auto dict = fsdp.optim_state_dict(*optimizer);
      if (rank == 0) saved = dict;
      else EXPECT_TRUE(dict.state.empty());
    });
    expect_same(saved, expected_state, 1e-4);
    SafetensorsFile file(path("full.safetensors"));
    for (const auto& item : plain->named_parameters())
      ASSERT_TRUE(at::allclose(file.load(item.key()), item.value(), 1e-4, 1e-5)) << item.key();
    for (const int to : {1, 2, 3, 4}) {
      for (const bool sharded : {true, false}) {
        run_ranks(to, [&](ProcessGroup group, int rank) {
          auto net = seeded<ResNet>(99);
          net->eval();
          FullyShardedDataParallel fsdp(net, group, every_leaf());
          auto optimizer = adamw(fsdp.parameters());
          if (sharded) fsdp.load_sharded_state_dict(path("sharded"));
          else fsdp.load_state_dict(path("full.safetensors"));
          fsdp.load_optim_state_dict(*optimizer, saved);
          for (auto& [name, value] : fsdp.state_dict(-1))
            ASSERT_TRUE(at::equal(value, file.load(name)))
                << name << " from " << from << " to " << to;
          expect_same(fsdp.optim_state_dict(*optimizer, -1), saved);
          train(fsdp, *optimizer, 3, 4, rank, to);
        });
      }
    }
    fs::remove_all(path("sharded"));
  }
}

/// Weights as a folder: the same bits as in one file, each rank's part within its share, read at
/// other world sizes.
TEST_F(FsdpState, EveryRankWritesItsPartOfAFolderOfWeights) {
  for (const int from : {1, 2, 3, 4}) {
    run_ranks(from, [&](ProcessGroup group, int) {
      auto net = seeded<ResNet>(3);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      fsdp.save_state_dict(path("one.safetensors"));
      fsdp.save_state_dict(path("parts/"));
    });
    const Weights one(path("one.safetensors")), parts(path("parts"));
    ASSERT_EQ(one.entries().size(), parts.entries().size());
    uint64_t total = 0, largest = 0, most = 0;
    for (const auto& entry : one.entries()) {
      EXPECT_TRUE(at::equal(one.load(entry.name), parts.load(entry.name))) << entry.name;
      total += entry.end - entry.begin;
      largest = std::max(largest, entry.end - entry.begin);
    }
    int files = 0;
    for (const auto& file : fs::directory_iterator(path("parts"))) {
      const std::string name = file.path().filename().string();
      if (name == kWeightsIndexName) continue;
      ++files;
      const SafetensorsFile part(file.path().string());
      most = std::max(most, part.entries().back().end);
    }
    EXPECT_EQ(files, from);
    EXPECT_LE(most, total / from + largest);
    for (const int to : {1, 3}) {
      run_ranks(to, [&](ProcessGroup group, int) {
        auto net = seeded<ResNet>(99);
        FullyShardedDataParallel fsdp(net, group, every_leaf());
        fsdp.load_state_dict(path("parts"));
        for (auto& [name, value] : fsdp.state_dict(-1))
          ASSERT_TRUE(at::equal(value, one.load(name))) << name;
      });
    }
    auto plain = seeded<ResNet>(98);
    load_state_dict(*plain, path("parts"));
    EXPECT_TRUE(at::equal(plain->named_parameters().front().value(),
                          one.load(plain->named_parameters().front().key())));
    fs::remove_all(path("parts"));
  }
}

TEST_F(FsdpState, AFolderOfWeightsThatIsNotWrittenOrNotClearedIsAnErrorOnAllRanks) {
  run_ranks(2, [&](ProcessGroup group, int) {
    auto net = seeded<ResNet>(3);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    fsdp.save_state_dict(path("parts/"));
    group.barrier();
    // A folder in the place of a part, which cannot be removed as the former save's.
    if (group.rank() == 1) {
      fs::remove(path("parts/model-00002-of-00002.safetensors"));
      fs::create_directories(path("parts/model-00002-of-00002.safetensors"));
    }
    group.barrier();
    EXPECT_THAT(thrown_by([&] { fsdp.save_state_dict(path("parts/")); }),
                AllOf(HasSubstr("save_state_dict"), HasSubstr("the new weights are written"),
                      HasSubstr("model-00002-of-00002.safetensors")));
    auto plain = seeded<ResNet>(4);
    load_state_dict(*plain, path("parts"));
  });
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<ResNet>(3);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    EXPECT_THAT(thrown_by([&] { fsdp.save_state_dict(path("of-" + std::to_string(rank) + "/")); }),
                AllOf(HasSubstr("rank 1 wrote it"), HasSubstr("rank 0 cannot see it")));
  });
  EXPECT_THROW(Weights(path("of-0")), UsageError);
}

TEST_F(FsdpState, GoesFromAndIntoZero) {
  run_ranks(3, [&](ProcessGroup group, int rank) {
    auto net = seeded<ResNet>(3), other = seeded<ResNet>(3);
    net->eval();
    other->eval();
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    auto optimizer = adamw(fsdp.parameters());
    ZeroRedundancyOptimizer zero(*other, group,
                                 default_optimizers().factory("AdamW", {{"lr", 0.02}}));
    train(other, zero, 0, 2, rank, 3);
    zero.consolidate_state_dict(-1);
    std::vector<std::pair<std::string, at::Tensor>> weights;
    for (const auto& item : other->named_parameters())
      weights.emplace_back(item.key(), item.value().detach());
    for (const auto& item : other->named_buffers()) weights.emplace_back(item.key(), item.value());
    fsdp.load_state_dict(weights);
    fsdp.load_optim_state_dict(*optimizer, zero.state_dict());
    expect_same(fsdp.optim_state_dict(*optimizer, -1), zero.state_dict());
    train(fsdp, *optimizer, 2, 4, rank, 3);
    train(other, zero, 2, 4, rank, 3);
    auto state = by_name(fsdp.state_dict(-1));
    for (const auto& item : other->named_parameters())
      ASSERT_TRUE(at::allclose(state[item.key()], item.value(), 1e-5, 1e-6)) << item.key();
    zero.load_state_dict(fsdp.optim_state_dict(*optimizer, -1));
  });
}

TEST_F(FsdpState, ChannelsLastKeepsItsMemoryOrder) {
  for (int world = 1; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Mixed>(3), plain = seeded<Mixed>(3);
      FullyShardedDataParallel fsdp(net, group, every_leaf());
      EXPECT_EQ(net->conv->weight.strides(), plain->conv->weight.strides());
      auto state = by_name(fsdp.state_dict(-1));
      for (const auto& item : plain->named_parameters())
        ASSERT_TRUE(at::equal(state[item.key()], item.value())) << item.key();
      const auto x = at::randn({2, 2, 4, 4}, at::make_generator<at::CPUGeneratorImpl>(1));
      EXPECT_TRUE(at::equal(fsdp(x), plain(x)));
      fsdp.save_sharded_state_dict(path("mixed"));
      auto elsewhere = seeded<Mixed>(4);
      elsewhere->conv->weight.set_data(elsewhere->conv->weight.detach().contiguous());
      FullyShardedDataParallel loaded(elsewhere, group, every_leaf());
      loaded.load_sharded_state_dict(path("mixed"));
      auto there = by_name(loaded.state_dict(-1));
      for (const auto& item : plain->named_parameters())
        ASSERT_TRUE(at::equal(there[item.key()], item.value())) << item.key();
    });
    fs::remove_all(path("mixed"));
  }
}

TEST_F(FsdpState, AShardedStateIsReplacedAsAWholeAndLoadsIntoOtherStrategies) {
  const auto strategy = [](ShardingStrategy sharding, Partition partition) {
    auto options = every_leaf();
    options.sharding_strategy = sharding;
    options.shard_group_size = 2;
    options.partition = partition;
    return options;
  };
  const std::vector<FullyShardedDataParallelOptions> all = {
      strategy(ShardingStrategy::full_shard, Partition::flat),
      strategy(ShardingStrategy::full_shard, Partition::whole),
      strategy(ShardingStrategy::hybrid_shard, Partition::flat),
      strategy(ShardingStrategy::no_shard, Partition::flat)};
  for (size_t i = 0; i < all.size(); ++i) {
    run_ranks(4, [&](ProcessGroup group, int rank) {
      auto net = seeded<Mixed>(20 + i), plain = seeded<Mixed>(20 + i), other = seeded<Mixed>(4);
      FullyShardedDataParallel saved(net, group, all[i]);
      saved.save_sharded_state_dict(path("model"));  // replaces that of the previous strategy
      FullyShardedDataParallel loaded(other, group, all[(i + 1) % all.size()]);
      loaded.load_sharded_state_dict(path("model"));
      auto there = by_name(loaded.state_dict(-1));
      for (const auto& item : plain->named_parameters())
        ASSERT_TRUE(at::equal(there[item.key()], item.value())) << item.key() << " " << i;
    });
    size_t folders = 0;
    for (const auto& entry : fs::directory_iterator(path("model"))) folders += entry.is_directory();
    EXPECT_EQ(folders, 1u);
  }
}

TEST_F(FsdpState, OneRankAloneHasTheState) {
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
    run_ranks(2, [&](ProcessGroup group, int rank) {
      auto options = every_leaf();
      options.sharding_strategy = strategy;
      FullyShardedDataParallel fsdp(seeded<Chain>(1), group, options);
      torch::optim::SGD optimizer(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      fsdp(rows(0, rank, 2)).sum().backward();
      optimizer.step();
      const auto name = fsdp.named_parameters()[0].first;
      for (int to = 0; to < 2; ++to) {
        EXPECT_EQ(fsdp.optim_state_dict(optimizer, to).state.empty(), rank != to);
        EXPECT_EQ(fsdp.full_parameter(name, to).defined(), rank == to);
      }
      const std::string text = "to is 2; expected a rank below 2, or -1 for all";
      EXPECT_THAT(thrown_by([&] { fsdp.optim_state_dict(optimizer, 2); }), HasSubstr(text));
      EXPECT_THAT(thrown_by([&] { fsdp.full_parameter(name, 2); }), HasSubstr(text));
      EXPECT_THAT(thrown_by([&] { fsdp.state_dict(2); }), HasSubstr(text));
    });
  }
}

TEST_F(FsdpState, OptionsOfTheOptimizerAreLoaded) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    FullyShardedDataParallel fsdp(seeded<Chain>(1), group, {});
    torch::optim::SGD optimizer(fsdp.parameters(), 0.1), other(fsdp.parameters(), 0.5);
    fsdp.load_optim_state_dict(other, fsdp.optim_state_dict(optimizer, -1));
    EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(other.param_groups()[0].options()).lr(), 0.1);
  });
}

TEST_F(FsdpState, IgnoredParametersArePartOfEveryState) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    // The ignored weight is `value` everywhere before `use`; the result is what it is after it.
    const auto weight_after = [&](int value, auto use) {
      auto net = seeded<Uneven>(1);
      net->last->weight.requires_grad_(false).fill_(value);
      auto options = every_leaf();
      options.ignored_states = {"last.weight"};
      FullyShardedDataParallel fsdp(net, group, options);
      use(fsdp);
      EXPECT_TRUE(net->last->weight.eq(net->last->weight.view(-1)[0]).all().item<bool>());
      return net->last->weight.view(-1)[0].item<int>();
    };
    std::vector<std::pair<std::string, at::Tensor>> state;
    weight_after(rank + 3, [&](auto& fsdp) {
      state = fsdp.state_dict(-1);
      fsdp.save_state_dict(path("w.safetensors"));
      fsdp.save_sharded_state_dict(path("s"));
    });
    EXPECT_EQ(weight_after(0, [&](auto& fsdp) { fsdp.load_state_dict(state); }), rank + 3);
    const auto file = path("w.safetensors");
    EXPECT_EQ(weight_after(0, [&](auto& fsdp) { fsdp.load_state_dict(file); }), 3);
    EXPECT_EQ(weight_after(0, [&](auto& fsdp) { fsdp.load_sharded_state_dict(path("s")); }), 3);
    load_state_dict(*seeded<Uneven>(2), file);  // has all that a plain module needs
    state.erase(std::find_if(state.begin(), state.end(),
                             [](const auto& item) { return item.first == "last.weight"; }));
    EXPECT_THAT(
        thrown_by([&] { weight_after(0, [&](auto& fsdp) { fsdp.load_state_dict(state); }); }),
        HasSubstr("load_state_dict: the state: missing last.weight"));
  });
}

TEST_F(FsdpState, ATiedWeightIsReadUnderAnyOfItsNames) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      a = register_module("a", torch::nn::Linear(3, 3));
      b = register_module("b", torch::nn::Linear(3, 3));
      b->weight = b->register_parameter("tied", a->weight);
    }
    torch::nn::Linear a{nullptr}, b{nullptr};
  };
  using Names = std::vector<std::string>;
  const auto weights = [](const Names& names, double last) {
    std::vector<std::pair<std::string, at::Tensor>> state;
    for (const auto& name : names) {
      state.emplace_back(name, at::arange(9, at::kFloat).view({3, 3}));
      if (name == names.back()) state.back().second[2][2] = last;
    }
    for (const auto* name : {"a.bias", "b.bias"}) state.emplace_back(name, at::ones({3}));
    state.emplace_back("b.weight", at::ones({3, 3}));
    return state;
  };
  const std::vector<Names> files{{"a.weight"}, {"b.tied"}, {"a.weight", "b.tied"}};
  for (size_t i = 0; i < files.size(); ++i) {
    save_safetensors(path(std::to_string(i)), weights(files[i], 8));
    // The tied weight is ignored by its first name or its second one, or sharded.
    for (const Names& ignored : {Names{}, Names{"a.weight"}, Names{"b.tied"}}) {
      run_ranks(2, [&](ProcessGroup group, int /*rank*/) {
        for (const bool file : {true, false}) {
          auto net = std::make_shared<TiedImpl>();
          net->a->weight.requires_grad_(ignored.empty());
          FullyShardedDataParallelOptions options;
          options.ignored_states = ignored;
          FullyShardedDataParallel fsdp(net, group, options);
          if (file) fsdp.load_state_dict(path(std::to_string(i)));
          else fsdp.load_state_dict(weights(files[i], 8));
          for (const auto& [name, tensor] : fsdp.state_dict(-1))
            if (name == "a.weight" || name == "b.tied")
              EXPECT_TRUE(at::equal(tensor.view(-1), at::arange(9, at::kFloat))) << name;
        }
      });
    }
  }
  save_safetensors(path("differs"), weights(files[2], 3));  // in the last rank's part
  run_ranks(2, [&](ProcessGroup group, int /*rank*/) {
    FullyShardedDataParallel fsdp(std::make_shared<TiedImpl>(), group);
    const std::string words = "\"b.tied\" differs from \"a.weight\"";
    EXPECT_THAT(thrown_by([&] { fsdp.load_state_dict(path("differs")); }), HasSubstr(words));
    EXPECT_THAT(thrown_by([&] { fsdp.load_state_dict(weights(files[2], 3)); }), HasSubstr(words));
  });
}

TEST_F(FsdpState, ABufferThatIsANegativeViewIsSavedWithItsValues) {
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = std::make_shared<WithBuffer>();
    net->mean.set_data(at::_neg_view(torch::tensor({1.0f, 2.0f})));
    ASSERT_TRUE(net->mean.is_neg());
    FullyShardedDataParallel<std::shared_ptr<WithBuffer>> fsdp(net, group);
    fsdp.save_state_dict(path("w.safetensors"));
    if (rank == 0)
      EXPECT_TRUE(at::equal(SafetensorsFile(path("w.safetensors")).load("mean"),
                            torch::tensor({-1.0f, -2.0f})));
  });
}

TEST_F(FsdpState, AStateThatDoesNotMatchIsAnErrorOnAllRanks) {
  const auto error_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "no error";
  };
  run_ranks(2, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(1);
    FullyShardedDataParallel fsdp(net, group, every_leaf());
    const auto good = fsdp.state_dict(-1);
    auto missing = good, more = good, shaped = good;
    missing.pop_back();
    more.emplace_back("last.weigt", at::zeros({1}));
    shaped[1].second = at::zeros({2, 2});
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(missing); }), HasSubstr("missing last.bias"));
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(more); }),
                HasSubstr("did you mean \"last.weight\""));
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(shaped); }),
                HasSubstr(good[1].first + " has shape [2, 2]"));
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(path("nothing.safetensors")); }),
                HasSubstr("nothing.safetensors"));
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(rank == 1 ? missing : good); }),
                HasSubstr("rank 1"));  // an error on one rank is thrown on all
    auto undefined = good, complex = good, differs = good;
    undefined[1].second = at::Tensor();
    complex[1].second = at::complex(good[1].second, good[1].second);
    if (rank == 1) differs[2].second = good[2].second + 1;
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(undefined); }),
                HasSubstr("the state: " + good[1].first + " is undefined; expected a tensor"));
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(complex); }),
                HasSubstr(good[1].first + " is complex; expected Float, as in the model"));
    EXPECT_THAT(error_of([&] { fsdp.load_state_dict(differs); }),
                HasSubstr("load_state_dict: " + good[2].first +
                          " has other values on rank 1 than on rank 0; expected the same state"));
    EXPECT_TRUE(at::equal(fsdp.full_parameter(good[2].first, -1), good[2].second));
    fsdp.save_sharded_state_dict(path("s"));
    auto larger_net = seeded<Uneven>(1);
    larger_net->register_parameter("more", at::zeros({2}));
    FullyShardedDataParallel larger(larger_net, group, every_leaf());
    EXPECT_THAT(error_of([&] { larger.load_sharded_state_dict(path("s")); }),
                AllOf(HasSubstr("load_sharded_state_dict: "), HasSubstr("missing more")));
    for (auto& parameter : larger.parameters()) parameter.data().fill_(rank + 7);
    EXPECT_THAT(larger.load_sharded_state_dict(path("s"), false).missing, ElementsAre("more"));
    auto partly = by_name(larger.state_dict(-1));
    for (const auto& [name, value] : good) EXPECT_TRUE(at::equal(partly[name], value)) << name;
    EXPECT_GE(partly["more"].min().item<float>(), 7);
    auto smaller_net = torch::nn::Sequential(torch::nn::Linear(3, 2));
    FullyShardedDataParallel smaller(smaller_net, group, every_leaf());
    const auto before = smaller.state_dict(-1);
    const auto nothing = smaller.load_sharded_state_dict(path("s"), false);
    EXPECT_EQ(nothing.missing.size(), 2u);
    EXPECT_EQ(nothing.unexpected.size(), good.size());
    EXPECT_TRUE(at::equal(smaller.state_dict(-1)[0].second, before[0].second));
    if (rank == 0) flip_last_byte(path("s/step-00000000/model-00000-of-00002.safetensors"));
    group.barrier();
    EXPECT_THAT(error_of([&] { fsdp.load_sharded_state_dict(path("s")); }),
                AllOf(HasSubstr("model-00000-of-00002"), HasSubstr("is damaged")));
    if (rank == 0) fs::remove(path("s/step-00000000/model-00001-of-00002.safetensors"));
    group.barrier();
    EXPECT_THAT(error_of([&] { fsdp.load_sharded_state_dict(path("s")); }),
                HasSubstr("model-00001-of-00002"));
    if (rank == 0) std::ofstream(path("s/step-00000000/manifest.json")) << "{";
    group.barrier();
    EXPECT_THAT(error_of([&] { fsdp.load_sharded_state_dict(path("s")); }),
                HasSubstr("load_sharded_state_dict"));
    EXPECT_THAT(error_of([&] { fsdp.save_sharded_state_dict("/proc/nowhere"); }),
                HasSubstr("/proc/nowhere"));
    EXPECT_THAT(error_of([&] { fsdp.load_sharded_state_dict(path("nowhere")); }),
                HasSubstr("nowhere"));
    EXPECT_THAT(error_of([&] { fsdp.save_state_dict("/proc/nowhere/file"); }),
                HasSubstr("/proc/nowhere"));
    auto after = by_name(fsdp.state_dict(-1));
    for (const auto& [name, value] : good) ASSERT_TRUE(at::equal(after[name], value)) << name;
  });
}

}  // namespace
