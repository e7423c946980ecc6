#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "harness/memory.h"
#include "harness/models.h"
#include "harness/slices.h"
#include "harness/thrown_by.h"
#include "optim/user_optimizer.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/optim/state_slice.h"

// Slices of plain optimizers: there and back bit by bit, aliases and copies, and what is refused.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;
using Optimizer = torch::optim::Optimizer;

const bool kFreedBlocksReturned = return_freed_blocks();

at::Tensor batch(int step) {
  return at::randn({4, 3}, at::make_generator<at::CPUGeneratorImpl>(100 + step));
}
at::Tensor image_batch(int step) {
  return at::randn({4, 2, 4, 4}, at::make_generator<at::CPUGeneratorImpl>(200 + step));
}

template <class Net, class Input>
void train(Net& net, Optimizer& optimizer, const Input& input, int from, int to) {
  for (int step = from; step < to; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      auto loss = (net(input(step)) - 0.5).square().mean();
      loss.backward();
      return loss;
    });
  }
}

std::unique_ptr<Optimizer> make(const std::string& name, const std::vector<at::Tensor>& parameters,
                                OptionMap options = {{"lr", 0.05}}) {
  return default_optimizers().factory(name,
                                      options)({torch::optim::OptimizerParamGroup(parameters)});
}

template <class Net>
std::vector<ParameterShard> shards_of(const Net& net) {
  return parameter_shards(named_parameters(*net));
}

template <class Net>
void copy_weights(const Net& from, const Net& to) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < from->parameters().size(); ++i)
    to->parameters()[i].copy_(from->parameters()[i]);
}

struct Case {
  std::string name;
  OptionMap options;
};

TEST(StateSlices, AnyOptimizerGoesOnFromThemBitByBit) {
  const std::vector<Case> cases = {{"SGD", {{"lr", 0.05}, {"momentum", 0.9}}},
                                   {"SGD", {{"lr", 0.05}}},
                                   {"Adam", {{"amsgrad", true}}},
                                   {"AdamW", {}},
                                   {"torch.AdamW", {}},
                                   {"Adagrad", {}},
                                   {"RMSprop", {{"momentum", 0.5}, {"centered", true}}},
                                   {"LBFGS", {{"max_iter", int64_t{3}}}}};
  for (const auto& [name, options] : cases) {
    auto net = seeded<Uneven>(1), other = seeded<Uneven>(2);
    const auto optimizer = make(name, net->parameters(), options),
               fresh = make(name, other->parameters(), options);
    train(net, *optimizer, batch, 0, 3);
    copy_weights(net, other);
    load_state_slices(*fresh, shards_of(other), state_slices(*optimizer, shards_of(net)));
    train(net, *optimizer, batch, 3, 6);
    train(other, *fresh, batch, 3, 6);
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_TRUE(at::equal(net->parameters()[i], other->parameters()[i])) << name << " " << i;
  }
}

TEST(StateSlices, AnLbfgsOfOneParameterKeepsItsFlatVectors) {
  const auto input = batch(0);
  auto first = torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false)),
       second = torch::nn::Linear(torch::nn::LinearOptions(3, 3).bias(false));
  const auto optimizer = make("LBFGS", first->parameters(), {}),
             fresh = make("LBFGS", second->parameters(), {});
  train(first, *optimizer, batch, 0, 2);
  copy_weights(first, second);
  load_state_slices(*fresh, shards_of(second), state_slices(*optimizer, shards_of(first)));
  train(first, *optimizer, batch, 2, 4);
  train(second, *fresh, batch, 2, 4);
  EXPECT_TRUE(at::equal(first->weight, second->weight));
}

TEST(StateSlices, AreTheOptimizersOwnAndLoadingCopies) {
  auto net = seeded<Uneven>(1), other = seeded<Uneven>(2);
  const auto optimizer = make("AdamW", net->parameters()),
             fresh = make("AdamW", other->parameters());
  train(net, *optimizer, batch, 0, 1);
  const auto slices = state_slices(*optimizer, shards_of(net));
  ASSERT_EQ(slices.size(), net->parameters().size());
  EXPECT_EQ(slices[1].parameter, "first.weight");  // a module's own parameters come first
  EXPECT_EQ(slices[1].shape, (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(slices[1].begin, 0);
  EXPECT_EQ(slices[1].numel, 9);
  const auto& live = slices[1].state.tensors.at("exp_avg");
  EXPECT_EQ(live.sizes(), (std::vector<int64_t>{9}));
  EXPECT_EQ(live.data_ptr(),
            get_state(*optimizer, net->first->weight)->tensors.at("exp_avg").data_ptr());
  load_state_slices(*fresh, shards_of(other), slices);
  const auto loaded = get_state(*fresh, other->first->weight)->tensors.at("exp_avg");
  EXPECT_EQ(loaded.sizes(), (std::vector<int64_t>{3, 3}));
  EXPECT_NE(loaded.data_ptr(), live.data_ptr());
  const auto before = loaded.clone();
  train(net, *optimizer, batch, 1, 2);
  EXPECT_FALSE(at::equal(live.view({3, 3}), before));
  EXPECT_TRUE(at::equal(loaded, before));
}

TEST(StateSlices, ThatAreMovedAreInMemoryOnce) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "malloc is the sanitizer's, which keeps freed blocks";
#endif
  ASSERT_TRUE(kFreedBlocksReturned);
  constexpr int64_t kCount = 8, kBytes = 8 * kMiB;
  std::vector<at::Tensor> parameters;
  NamedParameters named;
  for (int64_t i = 0; i < kCount; ++i) {
    parameters.push_back(at::zeros({kBytes / 4}).requires_grad_());
    named.emplace_back("p" + std::to_string(i), parameters.back());
  }
  const auto shards = parameter_shards(named);
  const auto read = [&] {
    std::vector<StateSlice> slices;
    for (int64_t i = 0; i < kCount; ++i) {
      slices.push_back({shards[i], {}});
      slices.back().state.tensors["momentum_buffer"] =
          at::full({kBytes / 4}, static_cast<double>(i));
    }
    return slices;
  };
  const auto growth = [&](auto load) {
    const auto optimizer = make("SGD", parameters, {{"lr", 0.1}, {"momentum", 0.9}});
    auto slices = read();
    const int64_t before = resident_bytes();
    reset_peak();
    load(*optimizer, slices);
    const int64_t peak = peak_bytes();
    for (int64_t i = 0; i < kCount; ++i) {
      const auto momentum = get_state(*optimizer, parameters[i])->tensors.at("momentum_buffer");
      EXPECT_TRUE(at::equal(momentum, at::full({kBytes / 4}, static_cast<double>(i))));
    }
    return peak - before;
  };
  EXPECT_GT(growth([&](auto& optimizer, auto& slices) {
              load_state_slices(optimizer, shards, slices);
              EXPECT_EQ(slices[0].state.tensors.at("momentum_buffer").numel(), kBytes / 4);
            }),
            kCount * kBytes - kMiB);
  EXPECT_LT(growth([&](auto& optimizer, auto& slices) {
              load_state_slices(optimizer, shards, std::move(slices));
            }),
            kBytes + kMiB);
}

TEST(StateSlices, RunInTheParametersMemoryOrderHoweverStateIsStored) {
  auto net = seeded<Mixed>(1), other = seeded<Mixed>(1);
  ASSERT_FALSE(net->conv->weight.is_contiguous());
  const auto optimizer = make("AdamW", net->parameters()),
             unlike = make("AdamW", other->parameters());
  train(net, *optimizer, image_batch, 0, 2);
  load_state_dict(*unlike, named_parameters(*other),
                  state_dict(*optimizer, named_parameters(*net)));
  auto state = *get_state(*unlike, other->conv->weight);
  for (auto& [name, tensor] : state.tensors) tensor = tensor.contiguous();
  set_state(*unlike, other->conv->weight, state);
  const auto average = get_state(*optimizer, net->conv->weight)->tensors.at("exp_avg");
  const auto run = average.permute({0, 2, 3, 1}).reshape({-1});  // channels last
  SlicePool pool, again;
  pool.add(state_slices(*optimizer, shards_of(net)));
  again.add(state_slices(*unlike, shards_of(other)));
  pool.expect_equal(again);
  for (const auto& slice : state_slices(*unlike, shards_of(other)))
    if (slice.parameter == "conv.weight")
      EXPECT_TRUE(at::equal(slice.state.tensors.at("exp_avg"), run));
  load_state_slices(*unlike, shards_of(other), state_slices(*optimizer, shards_of(net)));
  EXPECT_TRUE(at::equal(get_state(*unlike, other->conv->weight)->tensors.at("exp_avg"), average));
}

TEST(StateSlices, OfAnotherMemoryOrderAreRefusedByName) {
  auto net = seeded<Mixed>(1), other = seeded<Mixed>(1);
  other->conv->weight.set_data(other->conv->weight.detach().contiguous());
  const auto optimizer = make("AdamW", net->parameters()),
             unlike = make("AdamW", other->parameters());
  train(net, *optimizer, image_batch, 0, 1);
  auto slices = state_slices(*optimizer, shards_of(net));
  EXPECT_THAT(thrown_by([&] { load_state_slices(*unlike, shards_of(other), slices); }),
              ::testing::AllOf(HasSubstr("parameter conv.weight"), HasSubstr("[18, 1, 6, 2]"),
                               HasSubstr("[18, 9, 3, 1]")));
  // A tensor of the parameter's shape says its own order.
  const auto average = get_state(*optimizer, net->conv->weight)->tensors.at("exp_avg").clone();
  for (auto& slice : slices) {
    if (slice.parameter != "conv.weight") continue;
    slice.strides.clear();
    for (auto& [name, tensor] : slice.state.tensors)
      if (tensor.numel() == slice.numel)
        tensor = tensor.as_strided(slice.shape, net->conv->weight.strides());
  }
  load_state_slices(*unlike, shards_of(other), slices);
  EXPECT_TRUE(at::equal(get_state(*unlike, other->conv->weight)->tensors.at("exp_avg"), average));
}

TEST(StateSlices, AnEmptyStateIsNeverStepped) {
  for (const std::string name : {"AdamW", "Adagrad"}) {
    auto net = seeded<Uneven>(1);
    const auto optimizer = make(name, net->parameters()), fresh = make(name, net->parameters());
    train(net, *optimizer, batch, 0, 2);
    auto slices = state_slices(*fresh, shards_of(net));
    if (name == "AdamW")
      EXPECT_TRUE(slices[0].state.tensors.empty() && slices[0].state.scalars.empty());
    for (auto& slice : slices) slice.state = {};
    load_state_slices(*optimizer, shards_of(net), slices);
    SlicePool cleared, never;
    cleared.add(state_slices(*optimizer, shards_of(net)));
    never.add(state_slices(*fresh, shards_of(net)));
    cleared.expect_equal(never);
  }
}

TEST(StateSlices, ArePerTrainableParameterAndSkipWhatTheOptimizerLacks) {
  auto net = seeded<Uneven>(1);
  net->second->bias.requires_grad_(false);
  net->register_parameter("nothing", at::empty({0, 3}));
  const auto shards = shards_of(net);
  std::vector<std::string> names;
  for (const auto& shard : shards) {
    names.push_back(shard.parameter);
    EXPECT_EQ(shard.numel, c10::multiply_integers(shard.shape));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"scale", "first.weight", "second.weight",
                                             "last.weight", "last.bias"}));
  const auto head = make("AdamW", net->last->parameters());
  train(net, *head, batch, 0, 1);
  auto slices = state_slices(*head, shards);
  EXPECT_TRUE(slices[1].state.tensors.empty());
  EXPECT_EQ(slices[3].state.tensors.size(), 2u);
  load_state_slices(*head, shards, slices);
  EXPECT_EQ(head->state().size(), 2u) << "nothing for parameters that are not the optimizer's";
  slices[1].state = slices[3].state;
  try {
    load_state_slices(*head, shards, slices);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("first.weight, which is none of the optimizer's"));
  }
}

class Refusals : public ::testing::Test {
 protected:
  Refusals()
      : net_(seeded<Uneven>(1)),
        optimizer_(make("AdamW", net_->parameters())),
        shards_(shards_of(net_)) {
    train(net_, *optimizer_, batch, 0, 2);
    before_.add(state_slices(*optimizer_, shards_));
    const auto fresh = make("AdamW", net_->parameters());
    train(net_, *fresh, batch, 2, 3);
    SlicePool copies;
    copies.add(state_slices(*fresh, shards_));
    good_ = copies.cut(shards_);
  }

  StateSlice& slice(std::vector<StateSlice>& slices, const std::string& name) {
    for (auto& one : slices)
      if (one.parameter == name) return one;
    throw std::runtime_error(name);
  }

  void refused(const std::function<void(std::vector<StateSlice>&)>& spoil,
               const std::string& words) {
    auto slices = good_;
    spoil(slices);
    try {
      load_state_slices(*optimizer_, shards_, slices);
      ADD_FAILURE() << words;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
    SlicePool after;
    after.add(state_slices(*optimizer_, shards_));
    after.expect_equal(before_);
  }

  Uneven net_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<ParameterShard> shards_;
  SlicePool before_;
  std::vector<StateSlice> good_;
};

TEST_F(Refusals, NameTheParameterAndChangeNothing) {
  using Slices = std::vector<StateSlice>;
  refused([](Slices& s) { s.pop_back(); }, "there is no slice of parameter last.bias");
  refused([&](Slices& s) { slice(s, "last.bias").parameter = "last.bia"; },
          "last.bias; did you mean \"last.bia\"?");
  refused([&](Slices& s) { slice(s, "last.weight").begin = 2; },
          "no slice for elements 0 to 14 of parameter last.weight, but for elements 2 to 16");
  refused([&](Slices& s) { slice(s, "last.weight").numel = 13; },
          "elements 0 to 14 of parameter last.weight, but for elements 0 to 13");
  refused([](Slices& s) { s.push_back(s[2]); },
          "two slices for elements 0 to 21 of parameter second.weight");
  refused(
      [&](Slices& s) {
        slice(s, "last.weight").shape = {7, 2};
      },
      "parameter last.weight is of shape [7, 2]; expected [2, 7]");
  refused([&](Slices& s) { slice(s, "last.weight").state.tensors["exp_avg"] = at::zeros({13}); },
          "exp_avg of parameter last.weight has 13 elements; expected 14");
  refused([&](Slices& s) { slice(s, "last.weight").state.tensors["exp_avg"] = at::Tensor(); },
          "exp_avg of parameter last.weight has 0 elements");
  // What only the optimizer itself can tell, after it has taken the others.
  refused([&](Slices& s) { slice(s, "last.bias").state.tensors.erase("exp_avg"); },
          "parameter last.bias: set_state: the tensor exp_avg is missing");
  refused([&](Slices& s) { slice(s, "last.bias").state.tensors["exp_agv"] = at::zeros({2}); },
          "parameter last.bias: set_state");
}

TEST_F(Refusals, SlicesOfOtherShardsDoNotMatter) {
  auto slices = good_;
  slices.push_back({{"elsewhere", {3}, 0, 3}, {}});
  slices.push_back({{"last.weight", {2, 7}, 3, 4}, {}});
  load_state_slices(*optimizer_, shards_, slices);
  SlicePool given, after;
  given.add(good_);
  after.add(state_slices(*optimizer_, shards_));
  after.expect_equal(given);
}

TEST_F(Refusals, AShardMustBeWhatItSays) {
  shards_[0].numel = 2;
  EXPECT_THROW(state_slices(*optimizer_, shards_), UsageError);
  EXPECT_THROW(load_state_slices(*optimizer_, shards_, good_), UsageError);
  shards_[0].tensor = at::Tensor();
  EXPECT_THROW(state_slices(*optimizer_, shards_), UsageError);
}

TEST(StateSlices, OfAUsersOptimizer) {
  auto net = seeded<Uneven>(1), other = seeded<Uneven>(1);
  using User = UserOptimizer<true>;
  User optimizer({torch::optim::OptimizerParamGroup(net->parameters())}),
      fresh({torch::optim::OptimizerParamGroup(other->parameters())});
  train(net, optimizer, batch, 0, 2);
  train(other, fresh, batch, 0, 1);
  auto slices = state_slices(optimizer, shards_of(net));
  load_state_slices(fresh, shards_of(other), slices);
  SlicePool given, loaded;
  given.add(slices);
  loaded.add(state_slices(fresh, shards_of(other)));
  loaded.expect_equal(given);
  slices[1].state.scalars.erase("count");
  try {
    load_state_slices(fresh, shards_of(other), slices);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("parameter " + slices[1].parameter + ": set_state"));
  }
  SlicePool after;
  after.add(state_slices(fresh, shards_of(other)));
  after.expect_equal(given);
}

}  // namespace
