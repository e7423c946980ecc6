#include <torch/optim/adam.h>

#include "tessera/detail/trainer_access.h"
#include "zero/zero_harness.h"

// TrainerAccess::use_up_gradients(): the mean gradient replaces this rank's own gradient in the
// bucket.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;
using Access = tessera::zero::TrainerAccess;

int64_t parameter_bytes(const torch::nn::Module& module) {
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters())
    bytes += static_cast<int64_t>(parameter.nbytes());
  return bytes;
}

/// A step's gradients, in two backwards.
template <class Net>
void backwards(Net& net, Zero& zero, int step, int rank, int world) {
  {
    auto scope = zero.no_sync();
    loss_of(net(rows(2 * step, rank, world))).backward();
  }
  loss_of(net(rows(2 * step + 1, rank, world))).backward();
}

TEST(ZeroInPlace, TrainsBitByBitAsWithACopyAndNeedsNoMemoryForIt) {
  // Fused, where only clipping needs the mean as a tensor, and libtorch's, where each step does.
  const std::vector<OptimizerFactory> optimizers{
      factory("AdamW"), optimizer_factory<torch::optim::Adam>(torch::optim::AdamOptions(0.05))};
  for (const auto& optimizer : optimizers) {
    for (const auto partition : kPartitions) {
      for (int world = 1; world <= 4; ++world) {
        run_ranks(world, [&](ProcessGroup group, int rank) {
          auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
          Zero copied(*net, group, optimizer, {.partition = partition});
          Zero in_place(*other, group, optimizer, {.partition = partition});
          Access::use_up_gradients(in_place);
          for (int step = 0; step < 5; ++step) {
            backwards(net, copied, step, rank, world);
            backwards(other, in_place, step, rank, world);
            if (step % 2 == 0) {
              EXPECT_EQ(copied.clip_grad_norm_(0.1), in_place.clip_grad_norm_(0.1));
              copied.clip_grad_value_(0.01);
              in_place.clip_grad_value_(0.01);
            }
            copied.step();
            in_place.step();
            copied.zero_grad();
            in_place.zero_grad(step % 2 == 0);
            EXPECT_EQ(in_place.memory().gradients, parameter_bytes(*other)) << "step " << step;
          }
          expect_same_weights(net, other);
          if (world > 1 && copied.memory().optimizer_state > 0)
            EXPECT_GT(copied.memory().gradients, in_place.memory().gradients);
        });
      }
    }
  }
}

TEST(ZeroInPlace, AGradientThatWasUsedUpIsNotAddedTo) {
  enum class Way { nothing, optimizer, module, zeros };
  for (const auto way : {Way::nothing, Way::optimizer, Way::module, Way::zeros}) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8);
      Zero zero(*net, group, factory("AdamW"));
      Access::use_up_gradients(zero);
      for (int step = 0; step < 3; ++step) {
        backwards(net, zero, step, rank, 2);
        zero.clip_grad_norm_(0.1);
        zero.step();
        if (way == Way::optimizer) zero.zero_grad();
        if (way == Way::module) net->zero_grad();
        for (auto& parameter : net->parameters())
          if (way == Way::zeros) parameter.mutable_grad().zero_();
      }
    });
    for (const auto& error : errors)
      if (way == Way::nothing)
        EXPECT_THAT(message_of(error), HasSubstr("expected zero_grad() between step() and the"));
      else EXPECT_FALSE(error) << message_of(error);
  }
}

TEST(ZeroInPlace, ASecondStepWithTheSameGradientsIsAnError) {
  const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"));
    Access::use_up_gradients(zero);
    backwards(net, zero, 0, rank, 3);
    zero.clip_grad_norm_(INFINITY);
    zero.step();
    zero.step();
  });
  for (const auto& error : errors)
    EXPECT_THAT(message_of(error), HasSubstr("was already averaged and used by an earlier step"));
}

TEST(ZeroBehaviour, AParameterThatThawsBetweenClippingAndStepIsAnError) {
  for (const bool in_place : {false, true}) {
    for (const bool reduce : {false, true}) {
      run_ranks(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        net->last->weight.requires_grad_(false);
        Zero zero(*net, group, factory("AdamW"), {.reduce_gradients = reduce});
        if (in_place) Access::use_up_gradients(zero);
        loss_of(net(rows(0, rank, 2))).backward();
        zero.clip_grad_norm_(0.1);
        net->last->weight.requires_grad_(true);
        EXPECT_THAT(thrown_by([&] { zero.step(); }),
                    HasSubstr("parameter last.weight became trainable between clipping"));
        net->last->weight.requires_grad_(false);
        zero.step();
      });
    }
  }
}

}  // namespace
