#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

/// A tied embedding of more than 64 MiB that is most of its unit: see [Note: large parameters] in
/// gradients.cpp.
struct LargeParameterImpl : torch::nn::Module {
  LargeParameterImpl() {
    words = register_module("words", torch::nn::Embedding(33024, 512));
    inner = register_module("inner", torch::nn::Linear(512, 512));
  }
  torch::Tensor forward(torch::Tensor tokens) {
    return torch::nn::functional::linear(torch::tanh(inner(words(tokens))), words->weight);
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear inner{nullptr};
};
TORCH_MODULE(LargeParameter);

TEST(FsdpLargeParameter, EqualsThePlainModelWithOneAndTwoBackwards) {
  const auto tokens = [](int step, int part) {
    return (at::arange(12 / 2, at::kLong) * 37 + 1009 * (2 * step + part)) % 33024;
  };
  const auto loss = [](const at::Tensor& logits) {
    return torch::nll_loss(torch::log_softmax(logits, 1), at::arange(logits.size(0), at::kLong));
  };
  const auto options = torch::optim::SGDOptions(0.5).momentum(0.9);
  auto plain = seeded<LargeParameter>(3);
  torch::optim::SGD reference(plain->parameters(), options);
  for (int step = 0; step < 3; ++step) {
    reference.zero_grad();
    for (int part = 0; part < 2; ++part) loss(plain(tokens(step, part))).backward();
    reference.step();
  }
  const auto expected = copies(plain->parameters());
  for (int world = 1; world <= 2; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<LargeParameter>(3);
      FullyShardedDataParallel fsdp(net, group);
      torch::optim::SGD optimizer(fsdp.parameters(), options);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        if (world == 1) {
          {
            const auto local = fsdp.no_sync();
            loss(fsdp(tokens(step, 0))).backward();
          }
          loss(fsdp(tokens(step, 1))).backward();
        } else {
          (loss(fsdp(tokens(step, rank))) * world)
              .backward();  // the mean over ranks of `world` times the loss is the sum
        }
        optimizer.step();
      }
      const auto whole = fsdp.summon_full_params("", false);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i], expected[i], 1e-5, 1e-6)) << i;
    });
  }
}

/// The gradient's memory is returned as it moves to the flat buffer, unless something else reads
/// it.
TEST(FsdpLargeParameter, AGradientThatIsReadElsewhereKeepsItsValues) {
  class Reader : public torch::autograd::FunctionPostHook {
   public:
    explicit Reader(double& sum) : sum_(sum) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list& inputs) override {
      sum_ = inputs[0].detach().abs().sum().item<double>();
      return outputs;
    }

   private:
    double& sum_;
  };
  run_ranks(2, [](ProcessGroup group, int) {
    auto net = seeded<LargeParameter>(3);
    auto weight = net->words->weight;
    FullyShardedDataParallel fsdp(net, group);
    const auto tokens = at::arange(6, at::kLong);
    const auto backward = [&] {
      fsdp.zero_grad();
      fsdp(tokens).square().mean().backward();
      double total = 0;
      for (const auto& shard : fsdp.parameters()) total += shard.grad().abs().sum().item<double>();
      return total;
    };
    const double alone = backward();
    EXPECT_GT(alone, 0);
    at::Tensor kept;
    const auto hook = weight.register_hook([&](const at::Tensor& gradient) {
      kept = at::empty({0}).set_(gradient.storage(), 0, {gradient.numel()}, {1});
    });
    EXPECT_EQ(backward(), alone);
    EXPECT_GT(kept.abs().sum().item<double>(), 0) << "a hook holds an alias";
    const double expected = kept.abs().sum().item<double>();
    kept = at::Tensor();
    weight.remove_hook(hook);
    double read = 0;
    torch::autograd::impl::grad_accumulator(weight)->add_post_hook(std::make_unique<Reader>(read));
    EXPECT_EQ(backward(), alone);
    EXPECT_EQ(read, expected) << "autograd shows it to a later hook";
  });
}

/// The part of the whole pages of `tensor` that is in memory.
double resident(const void* data, size_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const size_t pages = (reinterpret_cast<uintptr_t>(data) + bytes - begin) / page;
  std::vector<unsigned char> there(pages);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), pages * page, there.data()), 0);
  return double(std::count_if(there.begin(), there.end(), [](auto flags) { return flags & 1; })) /
         double(pages);
}

TEST(FsdpLargeParameter, ClearedGradientsTakeNoMemoryInForward) {
  run_ranks(2, [](ProcessGroup group, int) {
    auto net = seeded<LargeParameter>(3);
    FullyShardedDataParallel fsdp(net, group);
    const auto loss = [&] { return fsdp(at::arange(6, at::kLong)).square().mean(); };
    const auto gradients = [&] {
      std::vector<at::Tensor> found;
      for (const auto& shard : fsdp.parameters()) found.push_back(shard.grad());
      return found;
    };
    loss().backward();
    const auto first = copies(gradients());
    size_t large = 0;
    while (first[large].nbytes() < 16u << 20) ++large;
    const void* data = gradients()[large].data_ptr();
    const size_t bytes = first[large].nbytes();
    EXPECT_EQ(resident(data, bytes), 1);

    loss().backward();  // added to those that were not cleared
    for (size_t i = 0; i < first.size(); ++i)
      EXPECT_TRUE(at::allclose(gradients()[i], first[i] * 2)) << i;

    auto held = gradients();
    const auto values = copies(held);
    fsdp.zero_grad();
    {
      const auto more = loss();
      for (size_t i = 0; i < values.size(); ++i)
        EXPECT_TRUE(at::equal(held[i], values[i])) << i << ": the program holds it";
    }
    held.clear();
    const auto last = loss();
    EXPECT_LT(resident(data, bytes), 0.01);
    last.backward();
    EXPECT_TRUE(at::equal(gradients()[large], first[large]));
    EXPECT_EQ(gradients()[large].data_ptr(), data);
    EXPECT_EQ(resident(data, bytes), 1);
  });
}

}  // namespace
