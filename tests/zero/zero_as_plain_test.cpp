#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/lbfgs.h>

#include "harness/slices.h"
#include "tessera/detail/trainer_access.h"
#include "tessera/module_state_dict.h"
#include "tessera/step/weight_average.h"
#include "zero/zero_harness.h"

// What a program does between backwards and steps means what it means in plain training, in every
// mode: edited gradients, gradients of zero, layers that freeze and thaw.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;
using Access = tessera::zero::TrainerAccess;

struct Mode {
  std::string name;
  ZeroOptions options;
};

std::vector<Mode> modes() {
  std::vector<Mode> result{{"plain", {}},
                           {"in place", {}},
                           {"background", {.overlap = Overlap::background}},
                           {"no overlap", {.overlap = Overlap::none}},
                           {"shard gradients", {.shard_gradients = true}},
                           {"whole", {.partition = Partition::whole}},
                           {"no view", {.parameters_as_bucket_view = false}},
                           {"shared", {.shard_gradients = true, .share_parameters = true}}};
  for (auto& mode : result) mode.options.bucket_cap_mb = 40.0 / (1 << 20);
  return result;
}

OptimizerFactory sgd() {
  return factory("SGD", {{"lr", 0.1}, {"momentum", 0.9}, {"weight_decay", 0.05}});
}

/// Two layers that a step uses in turn.
struct TurnsImpl : torch::nn::Module {
  TurnsImpl() : a(register_module("a", torch::nn::Linear(3, 5))) {
    b = register_module("b", torch::nn::Linear(3, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return a(x); }
  torch::nn::Linear a{nullptr}, b{nullptr};
};
TORCH_MODULE(Turns);

/// Runs `train(net, optimizer)` plainly and with each mode on `world` ranks, whose data are equal,
/// and compares the weights. `in_place`: also where step() may use up the gradients.
template <class Net, class Train>
void expect_plain(int world, bool in_place, const Train& train) {
  auto plain = seeded<Net>(8);
  const auto reference = sgd()({torch::optim::OptimizerParamGroup(plain->parameters())});
  train(plain, *reference, ZeroOptions());
  for (const auto& mode : modes()) {
    if (mode.name == "in place" && !in_place) continue;
    run_ranks(world, [&](ProcessGroup group, int) {
      auto net = seeded<Net>(8);
      Zero zero(*net, group, sgd(), mode.options);
      if (mode.name == "in place") Access::use_up_gradients(zero);
      train(net, zero, mode.options);
      zero.wait();
      expect_close(copies(net->parameters()), copies(plain->parameters()),
                   mode.name + ", world " + std::to_string(world));
    });
  }
}

TEST(ZeroAsPlain, AForwardAndEditedGradientsBetweenBackwardAndStep) {
  for (const int world : {1, 2, 3}) {
    expect_plain<Uneven>(world, true, [](auto& net, auto& optimizer, const ZeroOptions& options) {
      for (int step = 0; step < 5; ++step) {
        net->zero_grad(/*set_to_none=*/true);
        loss_of(net(rows(step))).backward();
        {
          const at::NoGradGuard no_grad;
          net(rows(100 + step));
        }
        const at::NoGradGuard no_grad;
        auto* const zero = dynamic_cast<Zero*>(&optimizer);
        if (zero && options.shard_gradients)
          for (const auto& shard : zero->shards()) shard.tensor.mutable_grad().mul_(0.25);
        else
          for (auto& p : net->parameters()) p.mutable_grad().mul_(0.25);
        optimizer.step();
      }
    });
  }
}

TEST(ZeroAsPlain, WeightsThatAreWrittenBetweenBackwardAndStep) {
  for (const int world : {1, 2, 3}) {
    expect_plain<Uneven>(world, true, [](auto& net, auto& optimizer, const ZeroOptions&) {
      for (int step = 0; step < 5; ++step) {
        net->zero_grad(/*set_to_none=*/true);
        loss_of(net(rows(step))).backward();
        const auto write = [&] {
          const at::NoGradGuard no_grad;
          for (auto& p : net->parameters()) p.mul_(0.9);
        };
        if (auto* const zero = dynamic_cast<Zero*>(&optimizer)) zero->with_shared_write(write);
        else write();
        optimizer.step();
      }
    });
  }
}

/// Momentum and weight decay go on for a layer whose gradient is zero.
TEST(ZeroAsPlain, GradientsOfZeroAreGradients) {
  for (const bool by_optimizer : {false, true}) {
    for (const int world : {1, 2, 3}) {
      expect_plain<Turns>(world, true, [&](auto& net, auto& optimizer, const ZeroOptions&) {
        auto* const zero = dynamic_cast<Zero*>(&optimizer);
        for (int step = 0; step < 6; ++step) {
          if (zero && by_optimizer) zero->zero_grad(/*set_to_none=*/false);
          else net->zero_grad(/*set_to_none=*/false);
          loss_of((step % 2 ? net->b : net->a)(rows(step))).backward();
          optimizer.step();
        }
      });
    }
  }
}

TEST(ZeroAsPlain, LayersWithoutAGradientAreSkipped) {
  for (const int world : {1, 2, 3}) {
    expect_plain<Turns>(world, true, [&](auto& net, auto& optimizer, const ZeroOptions&) {
      for (int step = 0; step < 6; ++step) {
        net->zero_grad(/*set_to_none=*/true);
        loss_of((step % 2 ? net->b : net->a)(rows(step))).backward();
        optimizer.step();
      }
    });
  }
}

TEST(ZeroAsPlain, GradientsThatAreNotClearedAddUp) {
  for (const int world : {1, 2, 3}) {
    const bool in_place = false;  // which makes it an error
    expect_plain<Turns>(world, in_place, [](auto& net, auto& optimizer, const ZeroOptions&) {
      for (int step = 0; step < 6; ++step) {
        if (step % 3 == 0) net->zero_grad(/*set_to_none=*/true);
        loss_of((step % 2 ? net->b : net->a)(rows(step))).backward();
        optimizer.step();
      }
    });
  }
}

/// A layer is frozen from step 2 to 4.
void freeze_or_thaw(Uneven& net, int step) {
  if (step == 2) net->second->weight.requires_grad_(false);
  if (step == 4) net->second->weight.requires_grad_(true);
}

template <class Optimizer>
void frozen_for_a_time(Uneven& net, Optimizer& optimizer, int from, int to, int rank = 0,
                       int world = 1) {
  for (int step = from; step < to; ++step) {
    freeze_or_thaw(net, step);
    net->zero_grad(/*set_to_none=*/true);
    loss_of(net(rows(step, rank, world))).backward();
    optimizer.step();
  }
}

TEST(ZeroAsPlain, ALayerThatIsFrozenForATimeKeepsItsState) {
  for (const int world : {1, 2, 3}) {
    expect_plain<Uneven>(world, true, [](auto& net, auto& optimizer, const ZeroOptions&) {
      frozen_for_a_time(net, optimizer, 0, 7);
    });
  }
}

TEST(ZeroAsPlain, ALayerThatWasFrozenAtConstructionIsTrainedWhenItThaws) {
  const auto train = [](Uneven& net, auto& optimizer, int rank, int world) {
    for (int step = 0; step < 6; ++step) {
      if (step == 2) net->second->weight.requires_grad_(true);
      net->zero_grad(/*set_to_none=*/true);
      loss_of(net(rows(step, rank, world))).backward();
      optimizer.step();
    }
  };
  auto plain = seeded<Uneven>(8);
  plain->second->weight.requires_grad_(false);
  const auto reference = sgd()({torch::optim::OptimizerParamGroup(plain->parameters())});
  train(plain, *reference, 0, 1);
  for (const auto& mode : modes()) {
    for (const int world : {1, 2, 3}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        net->second->weight.requires_grad_(false);
        Zero zero(*net, group, sgd(), mode.options);
        const auto before = zero.shards();
        train(net, zero, rank, world);
        zero.wait();
        expect_close(copies(net->parameters()), copies(plain->parameters()), mode.name);
        size_t found = 0;
        for (const auto& old : before)
          for (const auto& shard : zero.shards()) found += shard.tensor.is_same(old.tensor);
        EXPECT_EQ(found, before.size()) << mode.name << ": shards stay valid";
      });
    }
  }
  for (const auto& error : run_ranks_catching(2, [&](ProcessGroup group, int rank) {
         auto net = seeded<Uneven>(8);
         net->second->weight.requires_grad_(false);
         Zero zero(*net, group,
                   optimizer_factory<torch::optim::LBFGS>(torch::optim::LBFGSOptions(0.1)),
                   {.partition = Partition::whole});
         net->second->weight.requires_grad_(true);
         zero.step([&] {
           zero.zero_grad();
           auto loss = loss_of(net(rows(0, rank, 2)));
           loss.backward();
           return loss;
         });
       }))
    EXPECT_THAT(message_of(error), HasSubstr("parameter second.weight requires a gradient"));
}

TEST(ZeroAsPlain, AverageOfALayerThatIsFrozenForATime) {
  auto plain = seeded<Uneven>(8);
  const auto reference = sgd()({torch::optim::OptimizerParamGroup(plain->parameters())});
  WeightAverage whole(plain->parameters(), 0.5);
  for (int step = 0; step < 7; ++step) {
    frozen_for_a_time(plain, *reference, step, step + 1);
    whole.update();
  }
  for (const auto& mode : modes()) {
    for (const int world : {1, 2, 3}) {
      run_ranks(world, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8);
        Zero zero(*net, group, sgd(), mode.options);
        std::vector<at::Tensor> live;
        for (const auto& shard : zero.shards()) live.push_back(shard.tensor);
        WeightAverage average(live, 0.5);
        for (int step = 0; step < 7; ++step) {
          frozen_for_a_time(net, zero, step, step + 1, rank, world);
          average.update();
        }
        zero.wait_for_readers();
        average.swap();
        zero.gather_parameters();
        zero.wait();
        expect_close(copies(net->parameters()), copies(whole.averages()), mode.name);
      });
    }
  }
}

/// By slices and by state dicts, which are saved while a layer is frozen and loaded by a new
/// program, in which it is frozen after construction.
TEST(ZeroAsPlain, StateThatIsSavedWhileALayerIsFrozenHasThatOfTheLayer) {
  for (const bool slices : {true, false}) {
    for (const auto& mode : modes()) {
      run_ranks(3, [&](ProcessGroup group, int rank) {
        auto net = seeded<Uneven>(8), resumed = seeded<Uneven>(9);
        Zero zero(*net, group, sgd(), mode.options);
        frozen_for_a_time(net, zero, 0, 3, rank, 3);
        zero.wait();
        Zero again(*resumed, group, sgd(), mode.options);
        again.with_shared_write([&] { load_state_dict(*resumed, state_dict(*net)); });
        if (slices) {
          again.load_state_slices(zero.state_slices());
        } else {
          zero.consolidate_state_dict(-1);
          again.load_state_dict(zero.state_dict());
        }
        resumed->second->weight.requires_grad_(false);
        frozen_for_a_time(net, zero, 3, 7, rank, 3);
        frozen_for_a_time(resumed, again, 3, 7, rank, 3);
        zero.wait();
        again.wait();
        expect_same_weights(net, resumed);
      });
    }
  }
}

TEST(ZeroAsPlain, OneRankThatFreezesAParameterIsAnErrorOnAll) {
  for (const auto& error : run_ranks_catching(2, [&](ProcessGroup group, int rank) {
         auto net = seeded<Uneven>(8);
         Zero zero(*net, group, sgd());
         if (rank == 1) net->second->weight.requires_grad_(false);
         loss_of(net(rows(0, rank, 2))).backward();
         zero.step();
       }))
    EXPECT_THAT(message_of(error), HasSubstr("(check_contract)"));
}

/// Without a word of module->to().
TEST(ZeroAsPlain, TwoOptimizersOverTheSameParameters) {
  const auto train = [](Uneven& net, auto& first, auto& second) {
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(/*set_to_none=*/true);
      loss_of(net(rows(step))).backward();
      first.step();
      second.step();
    }
  };
  auto plain = seeded<Uneven>(8);
  const auto one = sgd()({torch::optim::OptimizerParamGroup(plain->parameters())});
  const auto other = sgd()({torch::optim::OptimizerParamGroup(plain->parameters())});
  train(plain, *one, *other);
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [&](ProcessGroup group, int) {
      auto net = seeded<Uneven>(8);
      Zero first(*net, group, sgd()), second(*net, group, sgd());
      train(net, first, second);
      expect_close(copies(net->parameters()), copies(plain->parameters()), "two optimizers");
    });
  }
}

/// What shares memory with the weight of `a`, or with that of `b`.
enum class Sharing { buffer, view, program };

struct SharersImpl : torch::nn::Module {
  explicit SharersImpl(Sharing how) : sharing(how) {
    a = register_module("a", torch::nn::Linear(3, 3));
    b = register_module("b", torch::nn::Linear(3, 3));
    if (how == Sharing::buffer) other = register_buffer("other", a->weight.detach());
    if (how == Sharing::view) other = a->weight.t();
    if (how == Sharing::program) {
      other = torch::from_blob(own.data(), {3, 3});
      b->weight.set_data(torch::from_blob(own.data(), {3, 3}));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(torch::tanh(b(a(x))), other); }
  Sharing sharing;
  std::vector<float> own = std::vector<float>(9, 0.2f);
  torch::nn::Linear a{nullptr}, b{nullptr};
  at::Tensor other;
};
TORCH_MODULE(Sharers);

TEST(ZeroAsPlain, MemoryThatSomethingSharesWithAParameterStaysShared) {
  const auto train = [](Sharers& net, auto& optimizer) {
    for (int step = 0; step < 5; ++step) {
      net->zero_grad(/*set_to_none=*/true);
      loss_of(net(rows(step))).backward();
      optimizer.step();
    }
  };
  for (const auto sharing : {Sharing::buffer, Sharing::view, Sharing::program}) {
    auto plain = seeded<Sharers>(8, sharing);
    const auto reference = sgd()({torch::optim::OptimizerParamGroup(plain->parameters())});
    train(plain, *reference);
    for (const auto& mode : modes()) {
      if (mode.options.share_parameters) continue;  // an error: below
      for (const int world : {1, 2, 3}) {
        run_ranks(world, [&](ProcessGroup group, int) {
          auto net = seeded<Sharers>(8, sharing);
          Zero zero(*net, group, sgd(), mode.options);
          train(net, zero);
          zero.wait();
          expect_close(copies(net->parameters()), copies(plain->parameters()), mode.name);
          EXPECT_TRUE(at::allclose(net->other, plain->other, 1e-4, 1e-6)) << mode.name;
          const auto& weight = sharing == Sharing::program ? net->b->weight : net->a->weight;
          EXPECT_EQ(net->other.data_ptr(), weight.data_ptr()) << mode.name << ", world " << world;
        });
      }
    }
  }
}

TEST(ZeroAsPlain, MemoryThatCannotStaySharedIsAnErrorThatNamesBoth) {
  const auto expect_error = [](const ZeroOptions& options, const std::string& text, auto make) {
    const auto errors = run_ranks_catching(2, [&](ProcessGroup group, int) {
      auto net = make();
      Zero zero(*net, group, sgd(), options);
    });
    for (const auto& error : errors) EXPECT_THAT(message_of(error), HasSubstr(text));
  };
  const auto buffer = [] { return seeded<Sharers>(8, Sharing::buffer); };
  const std::string a = "parameter a.weight shares its memory with buffer other";
  expect_error({.share_parameters = true}, a, buffer);
  expect_error({.wire = {.parameters = WireFormat::bfloat16}}, a, buffer);
  for (const bool view : {true, false}) {
    expect_error({.parameters_as_bucket_view = view}, "shares its memory with parameter ", [] {
      auto net = seeded<Turns>(8);
      net->b->weight.set_data(net->a->weight.data());
      return net;
    });
  }
}

}  // namespace
