#include <torch/nn/utils/clip_grad.h>

#include "tessera/detail/trainer_access.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/step/grad_scaler.h"
#include "zero/zero_harness.h"

// torch::nn::utils::clip_grad_norm_ over gradients that no rank has reduced yet: every rank would
// scale by its own norm.

namespace {

using namespace tessera;
using namespace tessera::testing;

constexpr char kRightCall[] = "expected optimizer.clip_grad_norm_(";

double clip(const torch::nn::Module& net, double p = 2) {
  return torch::nn::utils::clip_grad_norm_(net.parameters(), 1e-3, p);
}

double norm_of_grads(const torch::nn::Module& net) {
  double squares = 0;
  for (const auto& parameter : net.parameters())
    squares += parameter.grad().square().sum().item<double>();
  return std::sqrt(squares);
}

TEST(ZeroOwnNorm, ClippingByItIsAnErrorOnEveryRank) {
  for (int world = 2; world <= 3; ++world) {
    for (const auto partition : {Partition::flat, Partition::whole}) {
      for (const bool views : {true, false}) {
        for (const bool in_place : {true, false}) {
          const auto errors = run_ranks_catching(world, [&](ProcessGroup group, int rank) {
            auto net = seeded<Uneven>(8);
            Zero zero(*net, group, factory("AdamW"),
                      {.partition = partition, .parameters_as_bucket_view = views});
            if (in_place) tessera::zero::TrainerAccess::use_up_gradients(zero);
            for (int step = 0; step < 2; ++step) {
              loss_of(net(rows(step, rank, world))).backward();
              zero.clip_grad_norm_(1);
              zero.step();
              zero.zero_grad();
            }
            loss_of(net(rows(2, rank, world))).backward();
            clip(*net);
            ADD_FAILURE() << "rank " << rank << " goes on";
          });
          expect_usage_errors(errors, kRightCall);
          for (int rank = 0; rank < world; ++rank)
            expect_usage_errors({errors[rank]}, "ZeroRedundancyOptimizer: rank ");
        }
      }
    }
  }
}

TEST(ZeroOwnNorm, EveryNormAndEveryWayToTheGradientsIsRefused) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  enum class Way { one_backward, accumulated, no_sync, cleared_to_zero, module_cleared, logged };
  for (const auto way : {Way::one_backward, Way::accumulated, Way::no_sync, Way::cleared_to_zero,
                         Way::module_cleared, Way::logged}) {
    for (const double p : {2.0, 1.0, 3.0, kInfinity}) {
      const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        Zero zero(*net, group, factory("AdamW"));
        const auto backward = [&](int step) { loss_of(net(rows(step, rank, 2))).backward(); };
        if (way == Way::no_sync) {
          const auto scope = zero.no_sync();
          backward(0);
        } else if (way != Way::one_backward) {
          backward(0);
        }
        if (way == Way::cleared_to_zero) zero.zero_grad(false);
        if (way == Way::module_cleared) net->zero_grad();
        if (way != Way::no_sync) backward(1);
        if (way == Way::logged)
          for (const auto& parameter : net->parameters()) parameter.grad().norm();
        clip(*net, p);
      });
      expect_usage_errors(errors, kRightCall);
    }
  }
}

/// Clipping as programs write it themselves, over the norm of this rank's own gradients.
TEST(ZeroOwnNorm, AProgramsOwnClippingIsAnErrorOnEveryRank) {
  enum class Way {
    powers,
    squares,
    products,
    dots,
    joined,
    norms,
    largest,
    divided,
    one_rank_alone,
    tensor,
    replaced,
    replaced_by_tensor,
    end
  };
  for (auto way = Way::powers; way != Way::end; way = static_cast<Way>(static_cast<int>(way) + 1)) {
    SCOPED_TRACE(static_cast<int>(way));
    for (const bool early : {false, true}) {
      const auto errors = run_ranks_catching(3, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        Zero zero(*net, group, factory("AdamW"),
                  {.overlap = early ? Overlap::background : Overlap::none});
        for (int step = 0; step < 2; ++step) {
          loss_of(net(rows(step, rank, 3)) * (rank + 1)).backward();
          auto squares = torch::zeros({});
          std::vector<at::Tensor> flat;
          for (auto& p : net->parameters()) {
            const auto grad = p.grad();
            if (way == Way::powers) squares += grad.pow(2).sum();
            else if (way == Way::products) squares += (grad * grad).sum();
            else if (way == Way::dots) squares += torch::dot(grad.flatten(), grad.flatten());
            else if (way == Way::norms) squares += std::pow(grad.norm().item<double>(), 2);
            else if (way == Way::largest) squares = at::max(squares, grad.abs().max().square());
            else if (way == Way::joined) flat.push_back(grad.flatten());
            else squares += grad.square().sum();
          }
          if (way == Way::joined) squares = torch::cat(flat).square().sum();
          const double norm = std::sqrt(squares.item<double>());
          for (auto& p : net->parameters())
            if (way == Way::divided) p.grad().div_(norm + 1);
            else if (way == Way::tensor) p.grad().mul_(0.1 / (squares.sqrt() + 1e-6));
            else if (way == Way::replaced) p.mutable_grad() = p.grad() * (0.1 / norm);
            else if (way == Way::replaced_by_tensor) p.mutable_grad() = p.grad() / squares.sqrt();
            else if (way != Way::one_rank_alone || rank == 1) p.mutable_grad() *= 0.1 / norm;
          zero.step();
          zero.zero_grad();
        }
      });
      expect_usage_errors(errors, kRightCall);
    }
  }
}

TEST(ZeroOwnNorm, EqualScalesAndWeightsOfUnequalBatchesAreAllowed) {
  run_ranks(3, [&](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"));
    for (int step = 0; step < 3; ++step) {
      loss_of(net(rows(step, rank, 3))).backward();
      for (auto& p : net->parameters()) p.grad().mul_(0.5 + 0.1 * rank);  // by what the rank has
      auto squares = torch::zeros({1});
      for (auto& p : net->parameters())
        squares += step == 1 ? (p.grad() * p.grad()).sum() : p.grad().pow(2).sum();
      group.all_reduce(squares);
      for (auto& p : net->parameters())
        if (step == 0) p.grad().mul_(0.1 / squares.sqrt().item<double>());
        else if (step == 1) p.grad().mul_(0.1 / squares.sqrt());
        else p.mutable_grad() = p.grad() * (0.1 / squares.sqrt());
      zero.step();
      zero.zero_grad();
    }
  });
}

TEST(ZeroOwnNorm, ARankThatDoesNotClipHearsOfIt) {
  const auto errors = run_ranks_catching(3, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"));
    if (rank == 1) {  // libtorch's function returns 0 where there is no gradient
      EXPECT_EQ(clip(*net), 0);
    } else {
      loss_of(net(rows(0, rank, 3))).backward();
      clip(*net);
    }
    zero.step();
  });
  expect_usage_errors(errors, kRightCall);
}

/// Parameters whose gradients are large enough to be computed in their buckets.
struct Products : torch::nn::Module {
  Products() {
    first = register_parameter("first", torch::ones({128, 128}));
    second = register_parameter("second", torch::ones({128, 128}));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(x * first) * second; }
  at::Tensor first, second;
};

// Another tensor, which is kept in one step, has the window of a gradient: the bucket is displaced.
TEST(ZeroOwnNorm, ItIsRefusedInADisplacedBucketAndAfterItsReturn) {
  constexpr int kDisplaced = 3;
  for (const int last : {kDisplaced, kDisplaced + 1}) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int rank) {
      Products net;
      Zero zero(net, group, factory("AdamW"));
      std::vector<at::Tensor> kept;
      bool keep = false;
      net.first.register_hook([&](const at::Tensor& gradient) {
        if (keep) kept.push_back(gradient.detach());
      });
      const void* home = nullptr;
      for (int step = 0; step <= last; ++step) {
        keep = step == kDisplaced;
        kept.clear();
        loss_of(net.forward(random_batch({128, 128}, step + 10 * rank))).backward();
        const void* at = net.first.grad().data_ptr();
        if (step == kDisplaced - 1) home = at;
        if (step >= kDisplaced) EXPECT_EQ(at == home, step > kDisplaced);
        if (step == last) clip(net);
        zero.step();
        zero.zero_grad();
      }
    });
    expect_usage_errors(errors, kRightCall);
  }
}

TEST(ZeroOwnNorm, ScalesNormsAndLimitsOfOtherKindsAreAllowed) {
  for (int world = 1; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      auto net = seeded<Uneven>(8), other = seeded<Uneven>(8);
      Zero plain(*net, group, factory("AdamW")), scaled(*other, group, factory("AdamW"));
      const auto loss_scale = at::full({}, 8.0);
      const GradScaler scaler;
      for (int step = 0; step < 3; ++step) {
        loss_of(net(rows(step, rank, world))).backward();
        (loss_of(other(rows(step, rank, world))) * loss_scale).backward();
        std::vector<at::Tensor> gradients;
        for (const auto& parameter : other->parameters()) gradients.push_back(parameter.grad());
        EXPECT_FALSE(scaler.found_inf(gradients, group));
        for (auto& grad : gradients)
          if (step == 0) grad.mul_(1 / loss_scale);
          else grad.mul_(0.125);
        for (const auto& parameter : other->parameters())
          EXPECT_GE(parameter.grad().norm().item<float>(), 0);
        for (auto& model : {net, other}) {
          torch::nn::utils::clip_grad_value_(model->parameters(), 0.1);
          // A norm and then an update, parameter by parameter.
          for (const auto& parameter : model->parameters())
            parameter.grad().mul_(1 / (parameter.grad().norm() + 1));
          for (const auto& parameter : model->parameters()) parameter.grad().norm();
        }
        EXPECT_EQ(plain.clip_grad_norm_(1e-2), scaled.clip_grad_norm_(1e-2));
        for (auto* zero : {&plain, &scaled}) {
          zero->step();
          zero->zero_grad();
        }
      }
      expect_same_weights(net, other);
    });
  }
}

TEST(ZeroOwnNorm, NormsOfTheStepBeforeDoNotCount) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"));
    for (int step = 0; step < 3; ++step) {
      loss_of(net(rows(step, rank, 2))).backward();
      for (const auto& parameter : net->parameters()) parameter.grad().mul_(at::full({}, 0.5));
      for (const auto& parameter : net->parameters()) parameter.grad().norm();
      zero.step();
      zero.zero_grad();
    }
  });
}

/// clip() works as without the optimizer.
template <class Net>
void expect_clips(const Net& net) {
  const double norm = norm_of_grads(*net);
  ASSERT_GT(norm, 2e-3);
  EXPECT_NEAR(clip(*net), norm, 1e-5 * norm);
  EXPECT_NEAR(norm_of_grads(*net), 1e-3, 1e-6);
}

TEST(ZeroOwnNorm, WhereTheNormIsThatOfAllRanksItWorks) {
  run_ranks(1, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"));
    loss_of(net(rows(0))).backward();
    expect_clips(net);
    zero.step();
  });
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    DistributedDataParallel ddp(net, group);
    Zero zero(*net, group, factory("AdamW"));
    loss_of(ddp(rows(0, rank, 2))).backward();
    expect_clips(net);
    zero.step();
  });
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    Zero zero(*net, group, factory("AdamW"), {.reduce_gradients = false});
    loss_of(net(rows(0, rank, 2))).backward();
    for (auto& parameter : net->parameters()) group.all_reduce(parameter.mutable_grad(), 0.5);
    expect_clips(net);
    zero.step();
  });
}

TEST(ZeroOwnNorm, GradientsOutliveTheOptimizer) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Uneven>(8);
    std::optional<Zero> zero(std::in_place, *net, group, factory("AdamW"));
    loss_of(net(rows(0, rank, 2))).backward();
    std::vector<at::Tensor> before;
    for (const auto& parameter : net->parameters()) before.push_back(parameter.grad().clone());
    zero.reset();
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(at::equal(net->parameters()[i].grad(), before[i])) << i;
    expect_clips(net);
  });
}

}  // namespace
