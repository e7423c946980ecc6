// Every pair of options of DistributedDataParallel trains as plain libtorch does, or is refused
// with the words of the table in docs/zero.md.
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/training.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/error.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

constexpr int kPairSteps = 3;

struct PairNetImpl : torch::nn::Module {
  PairNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    last = register_module("last", torch::nn::Linear(7, 3));
    fixed = register_parameter("fixed", at::full({7}, 0.5), /*requires_grad=*/false);
  }
  torch::Tensor forward(torch::Tensor x) { return last(first(x).tanh() * fixed); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  at::Tensor fixed;
};
TORCH_MODULE(PairNet);

struct DdpChoice {
  std::string name;
  std::function<void(DistributedDataParallelOptions&)> make;
};

/// Each does something else than the default.
const std::vector<DdpChoice> kDdpChoices{
    {"first_bucket_mb", [](auto& o) { o.first_bucket_mb = 1e-5; }},
    {"bucket_cap_mb", [](auto& o) { o.bucket_cap_mb = 1e-5; }},
    {"buffers", [](auto& o) { o.buffers = BufferSync::none; }},
    {"find_unused_parameters", [](auto& o) { o.find_unused_parameters = true; }},
    {"static_graph", [](auto& o) { o.static_graph = true; }},
    {"overlap none", [](auto& o) { o.overlap = Overlap::none; }},
    {"overlap background", [](auto& o) { o.overlap = Overlap::background; }},
    {"parameters_to_ignore", [](auto& o) { o.parameters_to_ignore = {"last.bias"}; }},
    {"share_parameters", [](auto& o) { o.share_parameters = true; }},
    {"comm_hook", [](auto& o) { o.comm_hook = bf16_compress_hook(); }},
    {"wire", [](auto& o) { o.wire.gradients = WireFormat::bfloat16; }},
};

const std::map<std::set<std::string>, std::string> kDdpRefused{
    {{"comm_hook", "wire"}, "option wire.gradients is bfloat16, and option comm_hook replaces"},
};

at::Tensor pair_samples(int step, int rank) {
  return at::randn({4, 5}, at::make_generator<at::CPUGeneratorImpl>(10 * step + rank));
}

std::vector<at::Tensor> train_pair_plainly(int world) {
  auto net = seeded<PairNet>(3);
  auto optimizer = adamw({net->parameters()});
  for (int step = 0; step < kPairSteps; ++step) {
    clear_gradients(net->parameters());
    for (int rank = 0; rank < world; ++rank)
      (net(pair_samples(step, rank)).square().mean() / world).backward();
    optimizer->step();
  }
  return copies(net->parameters());
}

std::vector<at::Tensor> train_pair(const DistributedDataParallelOptions& options,
                                   const ProcessGroup& group, int rank) {
  auto net = seeded<PairNet>(3);
  DistributedDataParallel ddp(net, group, options);
  auto optimizer = adamw(net->parameters());
  for (int step = 0; step < kPairSteps; ++step) {
    clear_gradients(net->parameters());
    ddp(pair_samples(step, rank)).square().mean().backward();
    if (!options.parameters_to_ignore.empty()) {  // the caller's own mean
      ddp.wait();
      ProcessGroup(group).all_reduce(net->last->bias.mutable_grad(), 1.0 / group.size());
    }
    optimizer->step();
  }
  ddp.wait();
  return copies(net->parameters());
}

TEST(DdpPairs, OfOptionsTrainOrAreRefusedWithTheWordsOfTheTable) {
  const std::vector<int> hosts{0, 0, 1};
  const auto plain = train_pair_plainly(3);
  for (size_t a = 0; a < kDdpChoices.size(); ++a) {
    for (size_t b = a + 1; b < kDdpChoices.size(); ++b) {
      const std::string names = kDdpChoices[a].name + " and " + kDdpChoices[b].name;
      SCOPED_TRACE(names);
      DistributedDataParallelOptions options;
      kDdpChoices[a].make(options);
      kDdpChoices[b].make(options);
      const auto row = kDdpRefused.find({kDdpChoices[a].name, kDdpChoices[b].name});
      run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
        if (row != kDdpRefused.end()) {
          EXPECT_THAT([&] { train_pair(options, group, rank); },
                      ::testing::ThrowsMessage<UsageError>(HasSubstr(row->second)));
          return;
        }
        const auto weights = train_pair(options, group, rank);
        // AdamW moves each weight by about 0.02 a step, whatever the rounding of its gradient.
        const bool rounded = options.comm_hook || options.wire.gradients != WireFormat::float32;
        for (size_t i = 0; i < plain.size(); ++i)
          EXPECT_TRUE(at::allclose(weights[i], plain[i], 1e-4, rounded ? 4e-3 : 1e-6))
              << names << ": " << (weights[i] - plain[i]).abs().max();
      });
    }
  }
}

}  // namespace
