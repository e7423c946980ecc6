#include <algorithm>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include "fsdp/chain.h"
#include "harness/models.h"
#include "harness/ranks.h"
#include "harness/temporary_folder.h"
#include "tessera/checkpoint_store.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/safetensors.h"

// Full precision in evaluation, mixed precision in training.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct ShiftedImpl : ChainImpl {
  ShiftedImpl() { shift = register_buffer("shift", torch::full({2}, 1.0 / 3)); }
  torch::Tensor forward(torch::Tensor x) {
    seen = {x.scalar_type(), shift.scalar_type(), head->weight.scalar_type()};
    return ChainImpl::forward(x) + shift;
  }
  torch::Tensor shift;
  std::vector<at::ScalarType> seen;
};
TORCH_MODULE(Shifted);

FullyShardedDataParallelOptions half(bool full_in_eval, bool leaves = true) {
  FullyShardedDataParallelOptions options;
  if (leaves) options.wrap_policy = wrap_leaves();
  options.mixed_precision = {.param_dtype = at::kBFloat16,
                             .reduce_dtype = at::kFloat,
                             .buffer_dtype = at::kBFloat16,
                             .full_precision_in_eval = full_in_eval};
  return options;
}

template <class Fsdp>
void train_step(Fsdp& fsdp, torch::optim::Optimizer& optimizer, int i, int rank, int world) {
  optimizer.zero_grad();
  loss_of(fsdp(rows(i, rank, world)).to(at::kFloat)).backward();
  optimizer.step();
}

using Dtypes = std::vector<at::ScalarType>;

TEST(FsdpFullPrecisionInEval, EqualsThePlainModelAndDoesNotChangeTraining) {
  for (int world = 1; world <= 4; ++world) {
    for (const bool leaves : {true, false}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Shifted>(1), undisturbed = seeded<Shifted>(1), plain = seeded<Shifted>(1);
        FullyShardedDataParallel fsdp(net, group, half(true, leaves)),
            other(undisturbed, group, half(false, leaves));
        torch::optim::SGD optimizer(fsdp.parameters(), 0.1),
            other_optimizer(other.parameters(), 0.1);
        const auto shift = plain->shift.clone();
        for (int i = 0; i < 4; ++i) {
          train_step(fsdp, optimizer, i, rank, world);
          train_step(other, other_optimizer, i, rank, world);
          EXPECT_EQ(net->seen, Dtypes(3, at::kBFloat16));
          net->eval();
          {
            const torch::NoGradGuard no_grad;
            std::map<std::string, at::Tensor> weights;
            for (auto& [name, value] : fsdp.state_dict(-1)) weights[name] = value;
            for (auto& item : plain->named_parameters()) item.value().copy_(weights.at(item.key()));
            plain->shift.copy_(
                shift.to(at::kBFloat16));  // its value after the conversion at construction
            const auto out = fsdp(rows(50 + i));
            EXPECT_EQ(net->seen, Dtypes(3, at::kFloat));
            EXPECT_TRUE(at::equal(out, plain(rows(50 + i)))) << i;
            EXPECT_EQ(fsdp.stats().gathered_bytes, 0);
          }
          if (i == 1) {
            const auto whole = fsdp.summon_full_params();
            EXPECT_EQ(net->head->weight.scalar_type(), at::kFloat);
          }
          net->train();
        }
        for (size_t p = 0; p < fsdp.parameters().size(); ++p)
          EXPECT_TRUE(at::equal(fsdp.parameters()[p], other.parameters()[p])) << p;
      });
    }
  }
}

TEST(FsdpFullPrecisionInEval, UnitsMayBeLargerThanTheFirstUnit) {
  for (int world = 1; world <= 4; ++world) {
    run_ranks(world, [&](ProcessGroup group, int) {
      auto net = seeded<Uneven>(1), plain = seeded<Uneven>(1);
      FullyShardedDataParallel fsdp(net, group, half(true));
      net->eval();
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(fsdp(rows(3)), plain(rows(3))));
    });
  }
}

TEST(FsdpFullPrecisionInEval, GathersInTheDtypeThatItComputesIn) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    for (const bool full : {true, false}) {
      auto net = seeded<Shifted>(1);
      FullyShardedDataParallel fsdp(net, group, half(full));
      const torch::NoGradGuard no_grad;
      fsdp(rows(0));
      EXPECT_EQ(fsdp.stats().peak_gathered_bytes, 2 * 12 * 2);
      net->eval();
      fsdp.reset_stats();
      fsdp(rows(0));
      EXPECT_EQ(fsdp.stats().peak_gathered_bytes, 2 * 12 * (full ? 4 : 2));
      EXPECT_EQ(fsdp.stats().gathers_forward, 6u);
      EXPECT_EQ(net->seen, Dtypes(3, full ? at::kFloat : at::kBFloat16));
    }
  });
}

TEST(FsdpFullPrecisionInEval, GradientsInEvaluationModeEqualThePlainModels) {
  for (int world = 1; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Shifted>(1), plain = seeded<Shifted>(1);
      plain->shift.copy_(plain->shift.to(at::kBFloat16));
      auto options = half(true);
      options.resident_bytes = 1 << 20;  // units that stay from one mode are not used in the other
      FullyShardedDataParallel fsdp(net, group, options);
      torch::optim::SGD optimizer(fsdp.parameters(), 0.1), reference(plain->parameters(), 0.1);
      net->eval();
      for (int i = 0; i < 3; ++i) {
        step(fsdp, optimizer, rows(i, rank, world));
        step(plain, reference, rows(i));
      }
      const auto parameters = plain->named_parameters();
      for (auto& [name, value] : fsdp.state_dict(-1)) {
        const auto* expected = parameters.find(name);
        if (expected) EXPECT_TRUE(at::allclose(value, *expected, 1e-5, 1e-6)) << name;
      }
      net->train();
      train_step(fsdp, optimizer, 3, rank, world);
      EXPECT_EQ(net->seen, Dtypes(3, at::kBFloat16));
    });
  }
}

TEST(FsdpFullPrecisionInEval, ABackwardAfterAChangeOfModeIsRefused) {
  for (int world = 1; world <= 2; ++world) {
    run_ranks(world, [](ProcessGroup group, int rank) {
      auto net = seeded<Shifted>(1), undisturbed = seeded<Shifted>(1);
      FullyShardedDataParallel fsdp(net, group, half(true)), other(undisturbed, group, half(true));
      torch::optim::SGD optimizer(fsdp.parameters(), 0.1), other_optimizer(other.parameters(), 0.1);
      const auto loss = loss_of(fsdp(rows(0)).to(at::kFloat));
      net->eval();
      {
        const torch::NoGradGuard no_grad;
        fsdp(rows(0));
      }
      EXPECT_THAT(thrown_by([&] { loss.backward(); }),
                  AllOf(HasSubstr("head.weight"), HasSubstr("BFloat16"),
                        HasSubstr("full_precision_in_eval")));
      net->train();
      for (int i = 0; i < 2; ++i) {
        train_step(fsdp, optimizer, i, rank, group.size());
        train_step(other, other_optimizer, i, rank, group.size());
      }
      for (size_t p = 0; p < fsdp.parameters().size(); ++p)
        EXPECT_TRUE(at::equal(fsdp.parameters()[p], other.parameters()[p])) << p;
    });
  }
}

/// A complex and a real buffer that are conjugated and negated by a bit, as views of other tensors.
struct WithBitsImpl : ShiftedImpl {
  WithBitsImpl() {
    const auto z = torch::complex(torch::arange(3.0), torch::arange(1.0, 4.0));
    conjugated = register_buffer("conjugated", z.conj());
    negated = register_buffer("negated", torch::imag(z.conj()));
  }
  torch::Tensor conjugated, negated;
};
TORCH_MODULE(WithBits);

TEST(FsdpState, BuffersHaveTheirOwnDtypeAndValueWhateverTheLastForwardWas) {
  for (int world = 1; world <= 2; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      static const TemporaryFolder folder;
      auto net = seeded<WithBits>(1), plain = seeded<WithBits>(1);
      ASSERT_TRUE(net->conjugated.is_conj() && net->negated.is_neg());
      auto options = half(true);
      options.mixed_precision.buffer_dtype = at::kHalf;
      FullyShardedDataParallel fsdp(net, group, options);
      for (const bool training : {true, false, true}) {
        net->train(training);
        fsdp(rows(0, rank, world));
        EXPECT_EQ(net->seen[1], training ? at::kHalf : at::kFloat);
        const auto path = folder.path(std::to_string(world) + ".safetensors");
        fsdp.save_state_dict(path);
        fsdp.save_sharded_state_dict(folder.path(std::to_string(world)));
        group.barrier();
        const SafetensorsFile file(path);
        const Checkpoint checkpoint(folder.path(std::to_string(world)) + "/step-00000000");
        const auto state = fsdp.state_dict(-1);
        for (const std::string name : {"shift", "conjugated", "negated"}) {
          const auto expected = plain->named_buffers()[name];
          const auto held = std::find_if(state.begin(), state.end(),
                                         [&](const auto& item) { return item.first == name; });
          ASSERT_NE(held, state.end());
          for (const auto& value : {held->second, file.load(name),
                                    checkpoint.load_tensor("buffers.safetensors", name)}) {
            EXPECT_EQ(value.scalar_type(), expected.scalar_type()) << name << training;
            EXPECT_TRUE(at::allclose(value, expected, 1e-3)) << name << training;
          }
        }
        group.barrier();
      }
    });
  }
}

}  // namespace
