// Option wire.gradients in loops that leave out the update of some steps, and that scale the loss.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "harness/thrown_by.h"
#include "placements/wrappers.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kBackwards = 2;  // of a step
constexpr double kBucketMib = 2e-4;

/// A net in a wrapper, with what a loop calls that scales the loss.
struct Subject {
  Uneven net = seeded<Uneven>(8);
  virtual ~Subject() = default;
  virtual void backward(const at::Tensor& x, double scale) {
    loss_of(net(x)).mul(scale).backward();
  }
  /// Those that unscaling multiplies.
  virtual Tensors gradients() {
    Tensors result;
    for (const auto& parameter : net->parameters()) result.push_back(parameter.grad());
    return result;
  }
  /// The update. The gradients are cleared.
  virtual void step() = 0;
  /// Clears the gradients instead.
  virtual void skip() = 0;
  virtual void rescale(double factor) = 0;
  virtual Tensors weights() { return copies(net->parameters()); }
};

struct DdpSubject : Subject {
  DdpSubject(const ProcessGroup& group, WireFormat format)
      : ddp(net, group,
            {.first_bucket_mb = 1e-5, .bucket_cap_mb = kBucketMib, .wire = {.gradients = format}}) {
  }
  void backward(const at::Tensor& x, double scale) override {
    loss_of(ddp(x)).mul(scale).backward();
  }
  void step() override {
    optimizer->step();
    clear_gradients(net->parameters());
    ddp.end_step({});
  }
  void skip() override {
    clear_gradients(net->parameters());
    ddp.end_step({.used = false});
  }
  void rescale(double factor) override { ddp.end_step({.scale = factor}); }

  DistributedDataParallel<Uneven> ddp;
  std::unique_ptr<torch::optim::Optimizer> optimizer = adamw(net->parameters());
};

struct FsdpSubject : Subject {
  static FullyShardedDataParallelOptions options(WireFormat format, ShardingStrategy strategy) {
    FullyShardedDataParallelOptions result;
    result.wrap_policy = wrap_by_type<torch::nn::LinearImpl>();
    result.sharding_strategy = strategy;
    if (strategy == ShardingStrategy::hybrid_shard) result.shard_group_size = 2;
    result.wire.gradients = format;
    return result;
  }
  FsdpSubject(const ProcessGroup& group, WireFormat format, ShardingStrategy strategy)
      : fsdp(net, group, options(format, strategy)) {}
  void backward(const at::Tensor& x, double scale) override {
    loss_of(fsdp(x)).mul(scale).backward();
  }
  Tensors gradients() override {
    Tensors result;
    for (const auto& shard : fsdp.parameters()) result.push_back(shard.grad());
    return result;
  }
  void step() override {
    optimizer->step();
    fsdp.zero_grad();
    fsdp.end_step({.used = true});
  }
  void skip() override {
    fsdp.zero_grad();
    fsdp.end_step({.used = false});
  }
  void rescale(double factor) override { fsdp.end_step({.scale = factor}); }
  Tensors weights() override {
    const auto scope = fsdp.summon_full_params();
    return copies(net->parameters());
  }

  FullyShardedDataParallel<Uneven> fsdp;
  std::unique_ptr<torch::optim::Optimizer> optimizer = adamw(fsdp.parameters());
};

struct ZeroSubject : Subject {
  ZeroSubject(const ProcessGroup& group, WireFormat format, ZeroRedundancyOptimizerOptions options)
      : zero(*net, group, adamw_factory(), with_wire(options, format)) {}
  static ZeroRedundancyOptimizerOptions with_wire(ZeroRedundancyOptimizerOptions options,
                                                  WireFormat format) {
    options.bucket_cap_mb = kBucketMib;
    options.wire.gradients = format;
    return options;
  }
  Tensors gradients() override {
    if (!zero.options().shard_gradients) return Subject::gradients();
    Tensors result;
    for (const auto& shard : zero.shards()) result.push_back(shard.tensor.grad());
    return result;
  }
  void step() override {
    zero.step();
    zero.zero_grad();
  }
  void skip() override {
    zero.clip_grad_norm_(INFINITY);  // without shard_gradients it reduces
    zero.zero_grad();
  }
  void rescale(double factor) override { zero.end_step({.scale = factor}); }

  ZeroRedundancyOptimizer zero;
};

struct DistributedSubject : Subject {
  DistributedSubject(const ProcessGroup& group, WireFormat format)
      : optimizer(*net, group, adamw_factory(),
                  {.reduce_method = "mean",
                   .param_pack = true,
                   .param_pack_thd = 100,
                   .wire = {.gradients = format}}) {}
  void backward(const at::Tensor& x, double scale) override {
    optimizer.backward(loss_of(net(x)).mul(scale));
  }
  void step() override {
    optimizer.step();
    optimizer.zero_grad();
  }
  void skip() override { optimizer.zero_grad(false); }
  void rescale(double factor) override { optimizer.end_step({.scale = factor}); }

  DistributedOptimizer optimizer;
};

/// Makes the gradients undefined without the optimizer.
template <class Base>
struct ClearsItself : Base {
  using Base::Base;
  void skip() override { clear_gradients(this->net->parameters()); }
};

using MakeSubject = std::function<std::unique_ptr<Subject>(const ProcessGroup&, WireFormat)>;

template <class Made, class... Args>
MakeSubject maker(Args... args) {
  return [=](const ProcessGroup& group, WireFormat format) {
    return std::make_unique<Made>(group, format, args...);
  };
}

std::vector<std::pair<std::string, MakeSubject>> subjects(size_t world) {
  using Zero = ZeroRedundancyOptimizerOptions;
  std::vector<std::pair<std::string, MakeSubject>> all{
      {"ddp", maker<DdpSubject>()},
      {"zero", maker<ZeroSubject>(Zero{.overlap = Overlap::none})},
      {"zero, in background", maker<ZeroSubject>(Zero{.overlap = Overlap::background})},
      {"zero, sharded gradients", maker<ZeroSubject>(Zero{.shard_gradients = true})},
      {"zero, sharded gradients, cleared by the program",
       maker<ClearsItself<ZeroSubject>>(Zero{.shard_gradients = true})},
      {"distributed optimizer", maker<DistributedSubject>()},
      {"distributed optimizer, cleared by the program", maker<ClearsItself<DistributedSubject>>()},
      {"fsdp", maker<FsdpSubject>(ShardingStrategy::full_shard)}};
  if (world % 2 == 0)
    all.emplace_back("fsdp, hybrid", maker<FsdpSubject>(ShardingStrategy::hybrid_shard));
  return all;
}

struct Step {
  int batch;
  double scale = 1;      ///< Of the loss; unscaled by it, if it is finite.
  bool skipped = false;  ///< The gradients are dropped.
};

Tensors train(Subject& subject, int rank, const std::vector<Step>& steps) {
  double scale = steps[0].scale;
  for (const auto& step : steps) {
    // As after update() of a scaler: of the last step, or of an infinity.
    if (std::isfinite(step.scale) && step.scale != scale) {
      subject.rescale(step.scale / scale);
      scale = step.scale;
    }
    for (int i = 0; i < kBackwards; ++i)
      subject.backward(own_rows(kBackwards * step.batch + i, rank), step.scale);
    if (step.skipped) {
      subject.skip();
      continue;
    }
    {
      const at::NoGradGuard no_grad;
      for (const auto& gradient : subject.gradients())
        if (gradient.defined() && scale != 1) at::Tensor(gradient).mul_(1 / scale);
    }
    subject.step();
  }
  return subject.weights();
}

const std::vector<Step> kPlainSteps{{0}, {1}, {2}, {3}, {4}};

/// The weights after `steps` have the bits of those after kPlainSteps.
void expect_bits_of_plain_steps(const std::vector<Step>& steps) {
  for (const auto& hosts :
       {std::vector<int>{0, 1}, std::vector<int>{0, 0, 1}, std::vector<int>{0, 0, 1, 1}}) {
    for (const auto format : {WireFormat::bfloat16, WireFormat::int8}) {
      if (hosts.size() > 2 && format == WireFormat::bfloat16) continue;  // for time
      for (const auto& [name, make] : subjects(hosts.size())) {
        const auto weights_of = [&, &make = make](const std::vector<Step>& chosen) {
          std::vector<Tensors> all(hosts.size());
          run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
            all[rank] = train(*make(group, format), rank, chosen);
          });
          for (const auto& weights : all)
            for (size_t i = 0; i < weights.size(); ++i)
              EXPECT_TRUE(at::equal(weights[i], all[0][i])) << "the ranks differ";
          return all[0];
        };
        const auto found = weights_of(steps), expected = weights_of(kPlainSteps);
        bool equal = true;
        for (size_t i = 0; i < found.size(); ++i) equal &= at::equal(found[i], expected[i]);
        EXPECT_TRUE(equal) << name << ", " << to_string(format) << " on "
                           << ::testing::PrintToString(hosts);
      }
    }
  }
}

TEST(WireSteps, ADroppedStepLeavesNothingBehind) {
  expect_bits_of_plain_steps(
      {{0}, {1}, {9, 1, true}, {2}, {8, INFINITY, true}, {7, 1, true}, {3}, {4}});
}

TEST(WireSteps, ThePowersOfTwoOfALossScaleChangeNoBit) {
  expect_bits_of_plain_steps({{0, 4}, {1, 4}, {2, 8}, {3, 0.25}, {4, 65536}});
}

/// As GradScaler does after an infinity.
TEST(WireSteps, ADroppedStepThatChangesTheScale) {
  expect_bits_of_plain_steps(
      {{0, 4}, {1, 4}, {9, INFINITY, true}, {2, 2}, {8, 4, true}, {3, 1}, {4, 8}});
}

/// The weights after three steps of SGD; a new optimizer for each step has no errors to add.
template <class Optimizer, class Options>
Tensors train_sgd(const ProcessGroup& group, int rank, const Options& options, bool anew) {
  auto net = seeded<Uneven>(8);
  const auto sgd = default_optimizers().factory("SGD", {{"lr", 0.1}});
  std::unique_ptr<Optimizer> optimizer;
  for (int step = 0; step < 3; ++step) {
    if (!optimizer || anew) {
      optimizer.reset();
      optimizer = std::make_unique<Optimizer>(*net, group, sgd, options);
    }
    loss_of(net(own_rows(step, rank))).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return copies(net->parameters());
}

TEST(WireSteps, AnOptimizerKeepsTheErrorsOfItsSteps) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    const auto expect_kept = [](const Tensors& kept, const Tensors& anew, const char* name) {
      bool equal = true;
      for (size_t i = 0; i < kept.size(); ++i) equal &= at::equal(kept[i], anew[i]);
      EXPECT_FALSE(equal) << name;
    };
    const WireOptions wire{.gradients = WireFormat::int8};
    using Zero = ZeroRedundancyOptimizer;
    for (const bool sharded : {true, false}) {
      Zero::Options options;
      options.shard_gradients = sharded;
      options.wire = wire;
      expect_kept(train_sgd<Zero>(group, rank, options, false),
                  train_sgd<Zero>(group, rank, options, true), "zero");
    }
    const DistributedOptimizer::Options options{.reduce_method = "mean", .wire = wire};
    expect_kept(train_sgd<DistributedOptimizer>(group, rank, options, false),
                train_sgd<DistributedOptimizer>(group, rank, options, true),
                "distributed optimizer");
  });
}

TEST(WireSteps, ErrorsStayInMemoryOnce) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    ZeroSubject subject(group, WireFormat::int8, {.shard_gradients = true});
    int64_t first = 0;
    for (int step = 0; step < 4; ++step) {
      train(subject, rank, {{step, 1, step == 2}});
      const auto bytes = subject.zero.memory().gradients;
      if (step == 0) first = bytes;
      EXPECT_EQ(bytes, first) << step;
    }
  });
}

TEST(WireSteps, AFactorMustBePositiveAndFinite) {
  run_ranks_on({0, 1}, [](ProcessGroup group, int rank) {
    for (const auto& [name, make] : subjects(2)) {
      const auto subject = make(group, WireFormat::int8);
      for (const double factor : {0.0, -1.0, double{INFINITY}, double{NAN}})
        EXPECT_THAT(thrown_by([&] { subject->rescale(factor); }),
                    HasSubstr("rank " + std::to_string(rank) + ": end_step: scale is "))
            << name;
    }
    FsdpSubject subject(group, WireFormat::int8, ShardingStrategy::full_shard);
    subject.fsdp.call([&](Uneven&) {
      EXPECT_THAT(thrown_by([&] { subject.fsdp.end_step({}); }),
                  HasSubstr("end_step was called while the model runs"));
    });
  });
}

}  // namespace
}  // namespace tessera::testing
