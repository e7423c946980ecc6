// [Note: gradients in place] in src/sharding/gradients/gradient_placement.h: the wrappers must
// train bit by bit as a loop that all-reduces by hand, even if the graph changes.
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "harness/models.h"
#include "harness/ranks.h"
#include "memory/placement_allocator.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

using Order = std::vector<int>;
constexpr int kLayers = 5;
const Order kAll{0, 1, 2, 3, 4};
constexpr int64_t kWide = 160;

/// A gradient that user code keeps, and a copy of its values.
struct Kept {
  explicit Kept(at::Tensor tensor) : gradient(std::move(tensor)), copy(gradient.to(at::kDouble)) {}
  at::Tensor gradient;
  at::Tensor copy;  // not of a size that backward asks for
};

void expect_kept(const std::vector<Kept>& kept, const char* when) {
  for (const auto& one : kept)
    EXPECT_TRUE(at::equal(one.gradient.to(at::kDouble), one.copy)) << when;
}

/// What FullyShardedDataParallel wraps as a unit. No weight is more than half of it.
struct LayersImpl : torch::nn::Module {
  LayersImpl(int begin, int end) {
    for (int i = begin; i < end; ++i)
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWide, kWide)));
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Layers);

/// Weights of one size, which with kWide rows is also the size of the gradients of activations. The
/// last layer has a size that breaks alignment.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    const auto first = register_module("first", Layers(0, 2));
    const auto second = register_module("second", Layers(2, kLayers));
    layers = first->layers;
    layers.insert(layers.end(), second->layers.begin(), second->layers.end());
    odd = register_module("odd", torch::nn::Linear(kWide, 131));
  }
  torch::Tensor forward(torch::Tensor x, const Order& order) {
    for (const int i : order) {
      const auto layer = [this, i](at::Tensor h) { return torch::tanh(layers[i](h)); };
      x = recompute ? checkpoint(layer, x) : layer(x);
      if (kept)
        x.register_hook([this](const at::Tensor& gradient) { kept->emplace_back(gradient); });
    }
    return odd(x);
  }
  std::vector<torch::nn::Linear> layers;
  torch::nn::Linear odd{nullptr};
  bool recompute = false;
  std::vector<Kept>* kept = nullptr;  // all gradients of activations
};
TORCH_MODULE(Wide);

at::Tensor batch(int step, int rank) {
  return at::randn({kWide, kWide}, at::make_generator<at::CPUGeneratorImpl>(1000 * rank + step));
}
at::Tensor loss_of(const at::Tensor& y) { return (y - 0.25).square().mean(); }

OptimizerFactory adamw() { return default_optimizers().factory("AdamW", {{"lr", 1e-3}}); }

/// While it lives, fresh memory holds NaN.
class NanAllocator final : public compat::Allocator {
 public:
  NanAllocator() {
    // The placement allocator is never removed, so it must be installed before this one.
    memory::set_memory_source({});
    base_ = c10::GetAllocator(at::kCPU);
    c10::SetAllocator(at::kCPU, this);
  }
  ~NanAllocator() override { c10::SetAllocator(at::kCPU, base_); }

  at::DataPtr serve(size_t bytes) const override {
    auto memory = base_->allocate(bytes);
    if (bytes > 0) std::memset(memory.get(), 0xff, bytes);
    return memory;
  }
  at::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }

 private:
  at::Allocator* base_ = nullptr;
};

enum class Wrapper { ddp, zero, distributed, fsdp };

/// A model under a wrapper, and its twin: a plain one whose gradients are all-reduced by hand.
class Trained {
 public:
  Trained(Wrapper wrapper, ProcessGroup g)
      : group(std::move(g)), net(seeded<Wide>(3)), twin(seeded<Wide>(3)) {
    if (wrapper == Wrapper::ddp) {
      ddp = std::make_unique<DistributedDataParallel<Wide>>(
          net, group,
          DistributedDataParallelOptions{.bucket_cap_mb = 0.25, .find_unused_parameters = true});
      optimizer = adamw()({torch::optim::OptimizerParamGroup(net->parameters())});
    } else if (wrapper == Wrapper::distributed) {
      distributed = std::make_unique<DistributedOptimizer>(
          *net, group, adamw(), DistributedOptimizerOptions{.reduce_method = "mean"});
    } else if (wrapper == Wrapper::fsdp) {
      fsdp = std::make_unique<FullyShardedDataParallel<Wide>>(
          net, group,
          FullyShardedDataParallelOptions{.wrap_policy = wrap_by_name({"first", "second", "odd"})});
      optimizer = adamw()({torch::optim::OptimizerParamGroup(fsdp->parameters())});
    } else {
      auto zero = std::make_unique<ZeroRedundancyOptimizer>(*net, group, adamw());
      sharded = zero.get();
      optimizer = std::move(zero);
    }
    by_hand = adamw()({torch::optim::OptimizerParamGroup(twin->parameters())});
    for (auto& p : net->parameters()) {
      if (fsdp) break;  // it counts them itself
      p.register_hook([this, at = windows.size()](const at::Tensor& gradient) {
        computed_in_place += gradient.data_ptr() == windows[at];
      });
      windows.push_back(nullptr);
    }
  }

  at::Tensor forward(bool wrapped, const at::Tensor& x, const Order& order) {
    if (ddp && wrapped) return (*ddp)(x, order);
    if (fsdp && wrapped) return (*fsdp)(x, order);
    return (wrapped ? net : twin)(x, order);
  }

  /// `backward(wrapped)` does one step's backwards with either.
  void step(const std::function<void(bool wrapped)>& backward) {
    computed_in_place = 0;
    if (fsdp) fsdp->reset_stats();
    backward(true);
    if (fsdp) computed_in_place = static_cast<int>(fsdp->stats().gradients_in_place);
    for (size_t i = 0; i < windows.size(); ++i)
      windows[i] =
          net->parameters()[i].grad().defined() ? net->parameters()[i].grad().data_ptr() : nullptr;
    if (distributed) distributed->step();
    else optimizer->step();
    for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
    backward(false);
    for (auto& p : twin->parameters()) {
      if (!p.grad().defined() && others_use_all) p.mutable_grad() = at::zeros_like(p);
      if (p.grad().defined()) group.all_reduce(p.mutable_grad(), 1.0 / group.size());
    }
    by_hand->step();
    for (auto& p : twin->parameters()) p.mutable_grad() = at::Tensor();
  }

  void step(int n, const Order& order) {
    step(
        [&](bool wrapped) { loss_of(forward(wrapped, batch(n, group.rank()), order)).backward(); });
  }

  void expect_equal(const char* when) {
    const std::unique_ptr<FullParams> whole(fsdp ? new FullParams(fsdp->summon_full_params())
                                                 : nullptr);
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), twin->named_parameters()[item.key()]))
          << when << ": " << item.key() << ", rank " << group.rank();
  }

  void quietly(const std::function<void()>& backward) {
    const auto quiet = ddp           ? ddp->no_sync()
                       : distributed ? distributed->no_sync()
                       : fsdp        ? fsdp->no_sync()
                                     : sharded->no_sync();
    backward();
  }

  ProcessGroup group;
  Wide net, twin;
  std::unique_ptr<DistributedDataParallel<Wide>> ddp;
  std::unique_ptr<DistributedOptimizer> distributed;
  std::unique_ptr<FullyShardedDataParallel<Wide>> fsdp;
  ZeroRedundancyOptimizer* sharded = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer, by_hand;
  std::vector<const void*> windows;
  int computed_in_place = 0;
  bool others_use_all = false;  // what this rank has not used counts as zero
};

class Placement : public ::testing::TestWithParam<Wrapper> {
 protected:
  void on_worlds(const std::function<void(Trained&)>& body) {
    for (int world = 1; world <= 4; ++world) {
      SCOPED_TRACE(world);
      run_ranks(world, [&](ProcessGroup group, int) {
        Trained trained(GetParam(), std::move(group));
        body(trained);
      });
    }
  }
};

// The first backward learns, and DDP makes new buckets after it. Allocations before the first
// gradient of a backward are not seen.
constexpr int kLearned = 3;

TEST_P(Placement, GradientsAreComputedInTheirWindows) {
  on_worlds([](Trained& trained) {
    for (int n = 0; n < 6; ++n) {
      trained.step(n, kAll);
      if (n >= kLearned) EXPECT_GE(trained.computed_in_place, kLayers) << "step " << n;
    }
    trained.expect_equal("the same graph");
  });
}

TEST_P(Placement, AGraphThatChangesTrainsTheSame) {
  const std::vector<Order> orders{{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 1, 0},
                                  {2, 0, 3, 1}, {2},          {0, 1, 2, 3, 0, 1, 2, 3},
                                  {0, 1, 2, 3}};
  on_worlds([&](Trained& trained) {
    for (int n = 0; n < 14; ++n) {
      trained.net->recompute = n % 4 == 3;
      trained.step(n, orders[n % orders.size()]);
    }
    trained.expect_equal("other layers in each step");
  });
}

TEST_P(Placement, RecomputedActivationsTrainTheSame) {
  on_worlds([](Trained& trained) {
    trained.net->recompute = trained.twin->recompute = true;
    for (int n = 0; n < 5; ++n) trained.step(n, kAll);
    trained.expect_equal("activation checkpointing");
  });
}

TEST_P(Placement, GradientsThatAccumulateTrainTheSame) {
  on_worlds([](Trained& trained) {
    for (int n = 0; n < 6; ++n) {
      trained.step([&](bool wrapped) {
        for (int part = 0; part < 3; ++part) {
          const auto backward = [&] {
            loss_of(trained.forward(wrapped, batch(3 * n + part, trained.group.rank()), kAll))
                .backward();
          };
          if (wrapped && part < 2) trained.quietly(backward);
          else backward();
        }
      });
      if (n >= kLearned) EXPECT_GE(trained.computed_in_place, kLayers) << "step " << n;
    }
    trained.expect_equal("three backwards a step");
  });
}

TEST_P(Placement, GradientsOfGradientsTrainTheSame) {
  on_worlds([](Trained& trained) {
    for (int n = 0; n < 5; ++n)
      trained.step([&](bool wrapped) {
        auto x = batch(n, trained.group.rank()).requires_grad_();
        const auto y = loss_of(trained.forward(wrapped, x, kAll));
        const auto slope = torch::autograd::grad({y}, {x}, {}, true, true)[0];
        (y + slope.square().sum()).backward();
      });
    trained.expect_equal("a gradient penalty");
  });
}

// A gradient that a hook keeps, or an alias of it, keeps its values.
TEST_P(Placement, AGradientThatAHookKeepsStaysAsItWas) {
  for (const bool alias : {false, true}) {
    SCOPED_TRACE(alias ? "an alias" : "the tensor itself");
    on_worlds([&](Trained& trained) {
      std::vector<Kept> kept;
      bool keep = false;
      for (auto& p : trained.net->parameters())
        p.register_hook([&](const at::Tensor& gradient) {
          if (keep) kept.emplace_back(alias ? gradient.detach() : gradient);
        });
      for (int n = 0; n < 9; ++n) {
        keep = n == 3 || n == 5;
        trained.step(n, kAll);
        expect_kept(kept, "after a step");
        if (n == 7) kept.clear();
      }
      trained.expect_equal("a hook that keeps gradients");
    });
  }
}

TEST_P(Placement, AKeptGradientOutlivesTheGroup) {
  std::vector<Kept> kept;
  run_ranks(2, [&](ProcessGroup group, int rank) {
    Trained trained(GetParam(), std::move(group));
    bool keep = false;
    trained.net->layers[1]->weight.register_hook([&](const at::Tensor& gradient) {
      if (!keep || rank != 0) return;
      kept.emplace_back(gradient.detach());
    });
    for (int n = 0; n < 5; ++n) {
      keep = n == 4;
      trained.step(n, kAll);
    }
    trained.expect_equal("one rank's bucket has moved");
  });
  ASSERT_EQ(kept.size(), 1u);
  expect_kept(kept, "after the group has ended");
}

// One rank has another graph: one window holds a tensor that is kept, and other windows of its
// bucket count as zero there.
TEST_P(Placement, AnUnusedParameterCountsAsZeroInADisplacedBucket) {
  if (GetParam() == Wrapper::fsdp) return;  // all ranks must use the same parameters
  NanAllocator no_memory_is_zero_by_chance;
  run_ranks(2, [&](ProcessGroup group, int rank) {
    Trained trained(GetParam(), std::move(group));
    const Order usual{4, 3, 2, 1, 0}, other{1, 1, 1, 1, 1, 1};
    std::vector<Kept> kept;
    for (int n = 0; n < 7; ++n) {
      const bool odd_one = n == 4 && rank == 0;
      const auto windows = trained.windows;
      trained.others_use_all = odd_one;
      trained.step([&](bool wrapped) {
        trained.net->kept = wrapped && odd_one ? &kept : nullptr;
        loss_of(trained.forward(wrapped, batch(n, rank), odd_one ? other : usual)).backward();
      });
      trained.net->kept = nullptr;
      if (odd_one)
        EXPECT_TRUE(std::any_of(kept.begin(), kept.end(), [&](const Kept& one) {
          return std::find(windows.begin(), windows.end(), one.gradient.data_ptr()) !=
                 windows.end();
        })) << "a kept tensor is in a window";
      expect_kept(kept, "gradients of activations");
    }
    trained.expect_equal("an unused parameter");
  });
}

TEST_P(Placement, ADisplacedBucketReturnsToItsMemory) {
  on_worlds([](Trained& trained) {
    std::vector<Kept> kept;
    bool keep = false;
    trained.net->layers[2]->weight.register_hook([&](const at::Tensor& gradient) {
      if (keep) kept.emplace_back(gradient.detach());
    });
    std::vector<const void*> home;
    for (int n = 0; n < 9; ++n) {
      keep = n == 4;
      if (n == 6) kept.clear();
      trained.step(n, kAll);
      if (n == 3) home = trained.windows;
      if (n == 5 && !trained.fsdp) EXPECT_NE(trained.windows, home);
    }
    if (!trained.fsdp) EXPECT_EQ(trained.windows, home);
    EXPECT_GE(trained.computed_in_place, kLayers - 1) << "all but the mispredicted one";
    trained.expect_equal("there and back");
  });
}

TEST_P(Placement, PlacementStopsAfterAFewMispredictions) {
  on_worlds([](Trained& trained) {
    std::vector<Kept> kept;
    int keep = -1;
    for (int layer = 0; layer < 4; ++layer)
      trained.net->layers[layer]->weight.register_hook(
          [&kept, &keep, layer](const at::Tensor& gradient) {
            if (keep == layer) kept.emplace_back(gradient.detach());
          });
    for (int n = 0; n < 10; ++n) {
      keep = n - kLearned;
      kept.clear();
      trained.step(n, kAll);
      expect_kept(kept, "an alias");
    }
    EXPECT_EQ(trained.computed_in_place, 0) << "the fifth layer's neither";
    trained.expect_equal("four mispredictions");
  });
}

TEST_P(Placement, WithoutSharedMemory) {
  ProcessGroupOptions gloo;
  gloo.backend = Backend::Gloo;
  const auto body = [&](ProcessGroup group, int rank) {
    Trained trained(GetParam(), std::move(group));
    std::vector<Kept> kept;
    bool keep = false;
    trained.net->layers[2]->weight.register_hook([&](const at::Tensor& gradient) {
      if (keep && rank == 0) kept.emplace_back(gradient.detach());
    });
    for (int n = 0; n < 6; ++n) {
      keep = n == 4;
      trained.step(n, kAll);
      if (n == kLearned) EXPECT_GE(trained.computed_in_place, kLayers);
    }
    EXPECT_EQ(kept.size(), rank == 0 ? 1u : 0u);
    expect_kept(kept, "over Gloo");
    trained.expect_equal("over Gloo");
  };
  for (int world = 2; world <= 3; ++world) run_ranks(world, body, gloo);
}

TEST_P(Placement, ABackwardThatThrowsLeavesNothingBehind) {
  on_worlds([](Trained& trained) {
    bool fail = false;
    trained.net->layers[1]->bias.register_hook([&](const at::Tensor&) {
      if (fail) throw std::runtime_error("on purpose");
    });
    for (int n = 0; n < 6; ++n) {
      // In the latter a backward that throws has used gradients up.
      if (n == 4 && GetParam() != Wrapper::distributed) {
        fail = true;
        EXPECT_THROW(
            loss_of(trained.forward(true, batch(99, trained.group.rank()), kAll)).backward(),
            std::exception);
        fail = false;
        for (auto& p : trained.net->parameters()) p.mutable_grad() = at::Tensor();
      }
      trained.step(n, kAll);
    }
    trained.expect_equal("after a backward that threw");
  });
}

std::string name_of(const ::testing::TestParamInfo<Wrapper>& instance) {
  const std::vector<std::string> names{"ddp", "zero", "distributed", "fsdp"};
  return names[static_cast<size_t>(instance.param)];
}

INSTANTIATE_TEST_SUITE_P(Wrappers, Placement,
                         ::testing::Values(Wrapper::ddp, Wrapper::zero, Wrapper::distributed,
                                           Wrapper::fsdp),
                         name_of);

TEST(PlacementOnItsOwn, TwoOptimizersInOneBackward) {
  run_ranks(2, [](ProcessGroup group, int rank) {
    auto net = seeded<Wide>(3), twin = seeded<Wide>(3);
    const auto split = [](Wide& model) {
      std::vector<std::vector<std::pair<std::string, at::Tensor>>> halves(2);
      for (const auto& item : model->named_parameters())
        halves[item.key().starts_with("first.layer0") || item.key().starts_with("second.layer2")]
            .emplace_back(item.key(), item.value());
      return halves;
    };
    std::vector<std::unique_ptr<ZeroRedundancyOptimizer>> halves;
    for (const auto& half : split(net))
      halves.push_back(std::make_unique<ZeroRedundancyOptimizer>(
          std::vector<ZeroRedundancyOptimizer::Group>{{half, {}}}, group, adamw()));
    auto by_hand = adamw()({torch::optim::OptimizerParamGroup(twin->parameters())});
    for (int n = 0; n < 6; ++n) {
      loss_of(net(batch(n, rank), kAll)).backward();
      for (auto& half : halves) half->step();
      for (auto& p : net->parameters()) p.mutable_grad() = at::Tensor();
      loss_of(twin(batch(n, rank), kAll)).backward();
      for (auto& p : twin->parameters()) group.all_reduce(p.mutable_grad(), 0.5);
      by_hand->step();
      for (auto& p : twin->parameters()) p.mutable_grad() = at::Tensor();
    }
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), twin->named_parameters()[item.key()])) << item.key();
  });
}

TEST(PlacementAllocator, GivesAWindowToOneTensorAtATime) {
  const auto owner = at::zeros({1 << 16});
  EXPECT_FALSE(memory::is_placed(owner));
  auto first = memory::place_in(owner);
  ASSERT_TRUE(first);
  EXPECT_EQ(first.get(), owner.data_ptr());
  EXPECT_TRUE(memory::is_placed(owner));
  EXPECT_FALSE(memory::place_in(owner));
  first.clear();
  EXPECT_FALSE(memory::is_placed(owner));
  EXPECT_TRUE(memory::place_in(owner));
}

// libtorch's oneDNN asks for memory without a deleter, and frees it by address.
TEST(PlacementAllocator, MemoryCanBeFreedByItsAddress) {
  struct Source : memory::MemorySource {
    at::DataPtr serve(size_t bytes, at::Allocator& heap) override {
      auto placed = bytes == owner.nbytes() ? memory::place_in(owner) : at::DataPtr();
      return placed ? std::move(placed) : heap.allocate(bytes);
    }
    at::Tensor owner = at::zeros({1 << 16});
  };
  auto source = std::make_shared<Source>();
  const auto owner = source->owner;
  memory::set_memory_source(source);
  auto* const allocator = c10::GetAllocator(at::kCPU);
  void* const placed = allocator->raw_allocate(owner.nbytes());
  void* const heap = allocator->raw_allocate(owner.nbytes());
  EXPECT_EQ(placed, owner.data_ptr());
  EXPECT_NE(heap, owner.data_ptr());
  EXPECT_TRUE(memory::is_placed(owner));
  source.reset();
  allocator->raw_deallocate(placed);
  allocator->raw_deallocate(heap);
  EXPECT_FALSE(memory::is_placed(owner));
  EXPECT_EQ(memory::memory_source(), nullptr);
}

}  // namespace
