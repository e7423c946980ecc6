#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional.h>
#include <torch/optim/sgd.h>

#include "fsdp/models.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/models/gpt2.h"
#include "tessera/optim.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

constexpr int64_t kBatch = 12;
constexpr int kSteps = 5;

at::Tensor numbers(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed));
}
at::Tensor tokens(at::IntArrayRef sizes, uint64_t seed) {
  return at::randint(11, sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kLong);
}
at::Tensor part(const at::Tensor& whole, int rank, int world) {
  return whole.narrow(0, kBatch / world * rank, kBatch / world);
}
at::Tensor error_of(const at::Tensor& y) { return (y - 0.5).square().mean(); }

/// A model, and its loss on one rank's part of a step's batch. `run` calls the model or its
/// wrapper.
template <class Net>
struct Trial {
  std::function<Net()> make;
  std::function<at::Tensor(std::function<at::Tensor(std::vector<at::Tensor>)> run, int step,
                           int rank, int world)>
      loss;
};

template <class Net>
Trial<Net> one_input(std::function<at::Tensor(int step)> batch) {
  return {[] { return seeded<Net>(7); },
          [batch](auto run, int step, int rank, int world) {
            return error_of(run({part(batch(step), rank, world)}));
          }};
}

struct Setting {
  std::string name;
  FullyShardedDataParallelOptions options;
  Backend backend = Backend::Auto;
};

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name,
                                                        const std::vector<at::Tensor>& parameters) {
  if (name == "SGD")
    return std::make_unique<torch::optim::SGD>(parameters,
                                               torch::optim::SGDOptions(0.05).momentum(0.9));
  // eps: a gradient that is zero except for rounding, as that of a key bias, must not cause a step
  // of full size.
  return default_optimizers().factory(
      name, {{"lr", 0.01}, {"eps", 1e-4}})({torch::optim::OptimizerParamGroup(parameters)});
}

template <class Net>
void clear(Net& net) {
  for (auto p : net->parameters()) p.mutable_grad() = at::Tensor();
}

using Weights = std::vector<std::pair<std::string, at::Tensor>>;

template <class Net, class Call>
Weights train_plainly(const Trial<Net>& trial, const std::string& optimizer_name, Call call_model) {
  auto net = trial.make();
  auto optimizer = make_optimizer(optimizer_name, net->parameters());
  for (int step = 0; step < kSteps; ++step) {
    clear(net);
    trial.loss([&](std::vector<at::Tensor> inputs) { return call_model(net, inputs); }, step, 0, 1)
        .backward();
    optimizer->step();
  }
  Weights weights;
  for (const auto& item : net->named_parameters())
    weights.emplace_back(item.key(), item.value().detach().clone());
  return weights;
}

template <class Net, class Call>
void expect_parity(const Trial<Net>& trial, const Setting& setting, Call call_model) {
  ProcessGroupOptions group_options;
  group_options.backend = setting.backend;
  for (const std::string name : {"SGD", "AdamW"}) {
    const auto plain = train_plainly(trial, name, call_model);
    for (int world = 1; world <= 4; ++world) {
      run_ranks(
          world,
          [&](ProcessGroup group, int rank) {
            auto net = trial.make();
            FullyShardedDataParallel fsdp(net, group, setting.options);
            auto optimizer = make_optimizer(name, fsdp.parameters());
            for (int step = 0; step < kSteps; ++step) {
              for (auto p : fsdp.parameters()) p.mutable_grad() = at::Tensor();
              trial
                  .loss([&](std::vector<at::Tensor> inputs) { return call_model(fsdp, inputs); },
                        step, rank, world)
                  .backward();
              optimizer->step();
            }
            std::map<std::string, at::Tensor> state;
            for (auto& [key, value] : fsdp.state_dict(-1)) state[key] = value;
            for (const auto& [key, value] : plain) {
              if (!state.count(key)) continue;  // another name of a tied parameter
              ASSERT_TRUE(at::allclose(state[key], value, 1e-5, 1e-5))
                  << key << " " << name << " world " << world << " off by "
                  << (state[key] - value).abs().max();
              if (world == 1) ASSERT_TRUE(at::equal(state[key], value)) << key;
            }
            ASSERT_EQ(state.size(), fsdp.named_parameters().size() + net->buffers().size());
            if (world > 1) {
              int64_t bytes = 0, largest = 0;
              for (const auto& unit : fsdp.units()) bytes += unit.numel * 4;
              for (const auto& [key, value] : plain) largest = std::max(largest, value.numel() * 4);
              const int64_t uneven = setting.options.partition == Partition::flat
                                         ? 4 * static_cast<int64_t>(fsdp.units().size())
                                         : largest;
              ASSERT_LE(fsdp.memory().parameters, bytes / world + uneven);
            }
          },
          group_options);
    }
  }
}

const auto kOne = [](auto& model, const std::vector<at::Tensor>& inputs) -> at::Tensor {
  return model(inputs[0]);
};
const auto kTwo = [](auto& model, const std::vector<at::Tensor>& inputs) -> at::Tensor {
  return model(inputs[0], inputs[1]);
};
const auto kTuple = [](auto& model, const std::vector<at::Tensor>& inputs) -> at::Tensor {
  auto [y, h] = model(inputs[0], inputs[1], 0.75);
  return y + h.mean(1, true);
};

std::vector<Setting> settings() {
  FullyShardedDataParallelOptions leaves, root, post, stay, budget, whole, none, background;
  leaves.wrap_policy = wrap_leaves();
  post.wrap_policy = wrap_leaves();
  post.backward_prefetch = BackwardPrefetch::post;
  stay.wrap_policy = wrap_leaves();
  stay.sharding_strategy = ShardingStrategy::shard_grad_op;
  budget.wrap_policy = wrap_leaves();
  budget.resident_bytes = 1;
  whole.wrap_policy = wrap_leaves();
  whole.partition = Partition::whole;
  none.wrap_policy = background.wrap_policy = wrap_leaves();
  none.overlap = Overlap::none;
  background.overlap = Overlap::background;
  return {{"no_overlap", none},
          {"background", background},
          {"leaves", leaves},
          {"root_alone", root},
          {"post", post},
          {"shard_grad_op", stay},
          {"no_room", budget},
          {"whole", whole},
          {"tcp", leaves, Backend::TCP}};
}

class FsdpParity : public ::testing::TestWithParam<Setting> {};

TEST_P(FsdpParity, UnevenMlp) {
  expect_parity(one_input<Uneven>([](int step) {
                  return numbers({kBatch, 3}, 100 + step);
                }),
                GetParam(), kOne);
}
TEST_P(FsdpParity, Recurrent) {
  expect_parity(one_input<Recurrent>([](int step) {
                  return tokens({kBatch, 4}, 100 + step);
                }),
                GetParam(), kOne);
}
TEST_P(FsdpParity, Transformer) {
  const Trial<Translator> trial{
      [] { return seeded<Translator>(7); },
      [](auto run, int step, int rank, int world) {
        return error_of(run({part(numbers({kBatch, 3, 8}, 100 + step), rank, world),
                             part(numbers({kBatch, 2, 8}, 200 + step), rank, world)}));
      }};
  expect_parity(trial, GetParam(), kTwo);
}
TEST_P(FsdpParity, BlocksCalledTwiceAndOperatorsOfSeveralUnits) {
  expect_parity(one_input<Twice>([](int step) {
                  return numbers({kBatch, 3}, 100 + step);
                }),
                GetParam(), kOne);
}
TEST_P(FsdpParity, BranchesThatSkipABlock) {
  expect_parity(one_input<Skipping>([](int step) {
                  return numbers({kBatch, 3}, 100 + step);
                }),
                GetParam(), kOne);
}
TEST_P(FsdpParity, Containers) {
  expect_parity(one_input<Containers>([](int step) {
                  return numbers({kBatch, 3}, 100 + step);
                }),
                GetParam(), kOne);
}
TEST_P(FsdpParity, SeveralInputsAndATuple) {
  const Trial<Tuple> trial{
      [] { return seeded<Tuple>(7); },
      [](auto run, int step, int rank, int world) {
        return error_of(run({part(numbers({kBatch, 3}, 100 + step), rank, world),
                             part(numbers({kBatch, 3}, 200 + step), rank, world)}));
      }};
  expect_parity(trial, GetParam(), kTuple);
}
TEST_P(FsdpParity, Gpt2WithTiedHead) {
  GPT2Options gpt;
  gpt.vocab_size = 11;
  gpt.n_positions = 5;
  gpt.n_embd = 8;
  gpt.n_layer = 3;
  gpt.n_head = 2;
  const Trial<GPT2> trial{
      [gpt] { return GPT2(gpt); },
      [](auto run, int step, int rank, int world) {
        auto all = part(tokens({kBatch, 5}, 100 + step), rank, world);
        auto logits = run({all.narrow(1, 0, 4)});
        return F::cross_entropy(logits.reshape({-1, 11}), all.narrow(1, 1, 4).reshape({-1}));
      }};
  expect_parity(trial, GetParam(), kOne);
}

/// Each rank has its own batch statistics, so the comparison is with DDP.
TEST_P(FsdpParity, ResNetAgainstDdp) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<ResNet>(7), other = seeded<ResNet>(7);
      FullyShardedDataParallel fsdp(net, group, GetParam().options);
      DistributedDataParallel ddp(other, group, {.buffers = BufferSync::none});
      auto optimizer = make_optimizer("AdamW", fsdp.parameters()),
           reference = make_optimizer("AdamW", other->parameters());
      for (int step = 0; step < kSteps; ++step) {
        const auto x = part(numbers({kBatch, 3, 6, 6}, 100 + step), rank, world);
        for (auto p : fsdp.parameters()) p.mutable_grad() = at::Tensor();
        clear(other);
        auto loss = error_of(fsdp(x));
        auto expected = error_of(ddp(x));
        ASSERT_TRUE(at::allclose(loss, expected, 1e-5, 1e-6))
            << "step " << step << " world " << world;
        loss.backward();
        expected.backward();
        optimizer->step();
        reference->step();
      }
      std::map<std::string, at::Tensor> state;
      for (auto& [key, value] : fsdp.state_dict(-1)) state[key] = value;
      for (const auto& item : other->named_parameters())
        ASSERT_TRUE(at::allclose(state[item.key()], item.value(), 1e-5, 1e-5))
            << item.key() << " world " << world;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, FsdpParity, ::testing::ValuesIn(settings()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
