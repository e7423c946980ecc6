// Every pair of options of FullyShardedDataParallel trains as plain libtorch does. None is refused.
#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

constexpr int kPairSteps = 3;

struct PairNetImpl : torch::nn::Module {
  PairNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    last = register_module("last", torch::nn::Linear(7, 3));
    own = register_module("own", torch::nn::Linear(3, 3));
    own->weight.requires_grad_(false);
    own->bias.requires_grad_(false);
  }
  /// Ignored parameters keep their dtype with mixed precision.
  torch::Tensor forward(torch::Tensor x) {
    return own(last(first(x).tanh()).to(own->weight.scalar_type()));
  }
  torch::nn::Linear first{nullptr}, last{nullptr}, own{nullptr};
};
TORCH_MODULE(PairNet);

struct FsdpChoice {
  std::string name;
  std::function<void(FullyShardedDataParallelOptions&)> make;
};

/// Each does something else than the default.
const std::vector<FsdpChoice> kFsdpChoices{
    {"wrap_policy", [](auto& o) { o.wrap_policy = wrap_leaves(); }},
    {"shard_grad_op", [](auto& o) { o.sharding_strategy = ShardingStrategy::shard_grad_op; }},
    {"no_shard", [](auto& o) { o.sharding_strategy = ShardingStrategy::no_shard; }},
    {"hybrid_shard",
     [](auto& o) {
       o.sharding_strategy = ShardingStrategy::hybrid_shard;
       o.shard_group_size = 2;
     }},
    {"whole", [](auto& o) { o.partition = Partition::whole; }},
    {"first_fit", [](auto& o) { o.partition = Partition::first_fit; }},
    {"resident_bytes", [](auto& o) { o.resident_bytes = 200; }},
    {"prefetch post", [](auto& o) { o.backward_prefetch = BackwardPrefetch::post; }},
    {"prefetch none", [](auto& o) { o.backward_prefetch = BackwardPrefetch::none; }},
    {"overlap none", [](auto& o) { o.overlap = Overlap::none; }},
    {"overlap background", [](auto& o) { o.overlap = Overlap::background; }},
    {"mixed_precision", [](auto& o) { o.mixed_precision.param_dtype = at::kBFloat16; }},
    {"cpu_offload", [](auto& o) { o.cpu_offload = true; }},
    {"sync_module_states", [](auto& o) { o.sync_module_states = false; }},
    {"buffers", [](auto& o) { o.buffers = BufferSync::none; }},
    {"ignored_states", [](auto& o) { o.ignored_states = {"own"}; }},
    {"wire.gradients", [](auto& o) { o.wire.gradients = WireFormat::bfloat16; }},
    {"wire.parameters", [](auto& o) { o.wire.parameters = WireFormat::bfloat16; }},
};

/// Two values of one option.
bool is_one_option(const std::string& a, const std::string& b) {
  const std::vector<std::set<std::string>> values{{"shard_grad_op", "no_shard", "hybrid_shard"},
                                                  {"whole", "first_fit"},
                                                  {"prefetch post", "prefetch none"},
                                                  {"overlap none", "overlap background"}};
  return std::any_of(values.begin(), values.end(),
                     [&](const auto& each) { return each.count(a) + each.count(b) == 2; });
}

at::Tensor pair_samples(int step, int rank) {
  return at::randn({4, 5}, at::make_generator<at::CPUGeneratorImpl>(10 * step + rank));
}

std::vector<at::Tensor> train_pair_plainly(int world) {
  auto net = seeded<PairNet>(3);
  auto optimizer =
      adamw({net->first->weight, net->first->bias, net->last->weight, net->last->bias});
  for (int step = 0; step < kPairSteps; ++step) {
    clear_gradients(net->parameters());
    for (int rank = 0; rank < world; ++rank)
      (net(pair_samples(step, rank)).square().mean() / world).backward();
    optimizer->step();
  }
  return copies(net->parameters());
}

std::vector<at::Tensor> train_pair(const FullyShardedDataParallelOptions& options,
                                   const ProcessGroup& group, int rank) {
  auto net = seeded<PairNet>(3);
  FullyShardedDataParallel fsdp(net, group, options);
  auto optimizer = adamw(fsdp.parameters());
  for (int step = 0; step < kPairSteps; ++step) {
    fsdp.zero_grad(true);
    fsdp(pair_samples(step, rank)).square().mean().backward();
    optimizer->step();
  }
  const auto whole = fsdp.summon_full_params();
  return copies(net->parameters());
}

TEST(FsdpPairs, OfOptionsTrainAsPlainLibtorch) {
  const std::vector<int> hosts{0, 0, 1, 1};
  const auto plain = train_pair_plainly(4);
  for (size_t a = 0; a < kFsdpChoices.size(); ++a) {
    for (size_t b = a + 1; b < kFsdpChoices.size(); ++b) {
      if (is_one_option(kFsdpChoices[a].name, kFsdpChoices[b].name)) continue;
      const std::string names = kFsdpChoices[a].name + " and " + kFsdpChoices[b].name;
      SCOPED_TRACE(names);
      FullyShardedDataParallelOptions options;
      kFsdpChoices[a].make(options);
      kFsdpChoices[b].make(options);
      run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
        const auto weights = train_pair(options, group, rank);
        // AdamW moves each weight by about 0.02 a step, whatever the rounding of its gradient.
        const bool rounded = options.mixed_precision.param_dtype ||
                             options.wire.gradients != WireFormat::float32 ||
                             options.wire.parameters != WireFormat::float32;
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_TRUE(at::allclose(weights[i], plain[i], 1e-4, rounded ? 8e-3 : 1e-6))
              << names << ": " << (weights[i] - plain[i]).abs().max();
      });
    }
  }
}

}  // namespace
