#include <filesystem>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include "harness/temporary_folder.h"
#include "harness/thrown_by.h"
#include "optim/user_optimizer.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using torch::optim::Optimizer;

std::vector<at::Tensor> make_params() {
  torch::manual_seed(1);
  return {torch::randn({3, 4}).requires_grad_(), torch::randn({5}).requires_grad_()};
}

// A convex loss, so that LBFGS has something to do; the same for equal parameters.
at::Tensor loss_of(const std::vector<at::Tensor>& params) {
  at::Tensor loss = torch::zeros({});
  for (const auto& p : params) {
    loss = loss + (p * p * torch::linspace(1, 3, p.numel()).view(p.sizes())).sum() +
           p.abs().sqrt().sum();
  }
  return loss;
}

void step(Optimizer& optimizer, const std::vector<at::Tensor>& params) {
  optimizer.step([&] {
    optimizer.zero_grad();
    const auto loss = loss_of(params);
    loss.backward();
    return loss;
  });
}

void expect_equal(const ParamState& a, const ParamState& b) {
  EXPECT_EQ(a.scalars, b.scalars);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors)
    EXPECT_TRUE(at::equal(tensor, b.tensors.at(name))) << name;
}

ParamState deep_copy(const ParamState& state) {
  ParamState copy = state;
  for (auto& [name, tensor] : copy.tensors) tensor = tensor.clone();
  return copy;
}

// Three steps, then the state moves to a fresh optimizer over copies of the parameters: both go on
// alike.
void move_and_go_on(const OptimizerFactory& from, const OptimizerFactory& to, bool bitwise = true) {
  auto params = make_params();
  const auto first = from({torch::optim::OptimizerParamGroup(params)});
  for (int i = 0; i < 3; ++i) step(*first, params);
  std::vector<at::Tensor> others;
  for (const auto& p : params) others.push_back(p.detach().clone().requires_grad_());
  const auto second = to({torch::optim::OptimizerParamGroup(others)});
  size_t moved = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    if (const auto state = get_state(*first, params[i])) {
      set_state(*second, others[i], deep_copy(*state));
      expect_equal(get_state(*second, others[i]).value(), *state);
      ++moved;
    }
  }
  EXPECT_GT(moved, 0U);
  for (int i = 0; i < 3; ++i) {
    step(*first, params);
    step(*second, others);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(bitwise ? at::equal(params[i], others[i])
                        : at::allclose(params[i], others[i], 1e-5, 1e-6));
  }
}

TEST(State, MovesBetweenOptimizersOfEveryClass) {
  const auto registry = default_optimizers();
  const std::map<std::string, OptionMap> cases{
      {"torch.SGD", {{"lr", 0.05}, {"momentum", 0.9}}},
      {"SGD", {{"lr", 0.05}, {"momentum", 0.9}}},
      {"torch.Adam", {{"lr", 0.05}, {"amsgrad", true}}},
      {"Adam", {{"lr", 0.05}, {"amsgrad", true}}},
      {"torch.AdamW", {{"lr", 0.05}}},
      {"AdamW", {{"lr", 0.05}}},
      {"Adagrad", {{"lr", 0.05}, {"lr_decay", 0.1}}},
      {"RMSprop", {{"lr", 0.05}, {"momentum", 0.5}, {"centered", true}}},
      {"LBFGS", {{"lr", 0.05}, {"max_iter", int64_t{4}}}},
  };
  for (const auto& [name, options] : cases) {
    SCOPED_TRACE(name);
    move_and_go_on(registry.factory(name, options), registry.factory(name, options));
    if (name.starts_with("torch.")) {
      const auto fused = registry.factory(name.substr(6), options);
      move_and_go_on(registry.factory(name, options), fused, false);
      move_and_go_on(fused, registry.factory(name, options), false);
    }
  }
}

TEST(State, IsNoneBeforeTheFirstStepAndLiveAfter) {
  auto params = make_params();
  torch::optim::Adam adam(params);
  EXPECT_FALSE(get_state(adam, params[0]).has_value());
  step(adam, params);
  const auto state = get_state(adam, params[0]).value();
  const auto before = state.tensors.at("exp_avg").clone();
  step(adam, params);
  EXPECT_FALSE(at::equal(state.tensors.at("exp_avg"), before));
  EXPECT_TRUE(follows_parameter(state.tensors.at("exp_avg"), params[0]));
  EXPECT_FALSE(follows_parameter(torch::zeros({}), params[0]));
  clear_state(adam, params[0]);
  EXPECT_FALSE(get_state(adam, params[0]).has_value());
  EXPECT_TRUE(get_state(adam, params[1]).has_value());
}

TEST(State, LbfgsListsAreFlattened) {
  auto params = make_params();
  torch::optim::LBFGS lbfgs(params, torch::optim::LBFGSOptions(0.05).max_iter(4));
  step(lbfgs, params);
  const auto state = get_state(lbfgs, params[0]).value();
  EXPECT_EQ(state.tensors.count("d"), 1U);
  EXPECT_EQ(state.tensors.count("old_dirs.0"), 1U);
  EXPECT_GE(std::get<int64_t>(state.scalars.at("old_dirs.size")), 1);
  EXPECT_GE(std::get<int64_t>(state.scalars.at("n_iter")), 1);
  EXPECT_FALSE(follows_parameter(state.tensors.at("d"), params[0]));
}

TEST(State, RefusesUnknownAndMissingNames) {
  auto params = make_params();
  torch::optim::Adam adam(params);
  const auto zeros = torch::zeros({3, 4});
  try {
    set_state(adam, params[0],
              {{{"exp_avg", zeros}, {"exp_avg_sq", zeros}, {"exp_avgs", zeros}}, {}});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("mean \"exp_avg\""));
  }
  EXPECT_THROW(set_state(adam, params[0], {{{"exp_avg", zeros}}, {}}), UsageError);
  EXPECT_FALSE(get_state(adam, params[0]).has_value());
}

TEST(State, FusedTakesStateOfAnotherDtypeAndRefusesAnotherSize) {
  auto params = make_params();
  step(*default_optimizers().factory("Adam")({torch::optim::OptimizerParamGroup(params)}), params);
  FusedAdam adam(params);
  const auto wide = torch::full({3, 4}, 0.5, at::kDouble);
  set_state(
      adam, params[0],
      {{{"exp_avg", wide}, {"exp_avg_sq", wide.t().contiguous().t()}}, {{"step", int64_t{3}}}});
  step(adam, params);
  EXPECT_EQ(get_state(adam, params[0])->tensors.at("exp_avg").scalar_type(), at::kFloat);
  EXPECT_EQ(std::get<int64_t>(get_state(adam, params[0])->scalars.at("step")), 4);
  set_state(adam, params[0],
            {{{"exp_avg", torch::zeros({2})}, {"exp_avg_sq", torch::zeros({2})}}, {}});
  EXPECT_THROW(step(adam, params), UsageError);
}

TEST(State, AdagradHasItsInitialStateAfterClearAndAddedGroups) {
  auto params = make_params();
  torch::optim::Adagrad adagrad(std::vector<at::Tensor>{params[0]},
                                torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
  add_param_group(adagrad, torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{params[1]}));
  EXPECT_TRUE(at::equal(get_state(adagrad, params[1])->tensors.at("sum"), torch::full({5}, 0.5)));
  step(adagrad, params);
  clear_state(adagrad, params[0]);
  step(adagrad, params);
  EXPECT_EQ(std::get<int64_t>(get_state(adagrad, params[0])->scalars.at("step")), 1);
  EXPECT_EQ(std::get<int64_t>(get_state(adagrad, params[1])->scalars.at("step")), 2);
}

TEST(State, AddedGroupsKeepTheirOptionsExactly) {
  auto params = make_params();
  torch::optim::Adam adam(std::vector<at::Tensor>{params[0]}, torch::optim::AdamOptions(0.5));
  add_param_group(adam, {{params[1]}, std::make_unique<torch::optim::AdamOptions>(1e-3)});
  EXPECT_EQ(adam.param_groups()[1].options().get_lr(), 1e-3);
}

TEST(State, SavedArchivesInterchangeWithLibtorchs) {
  auto params = make_params();
  FusedAdamW fused(params);
  step(fused, params);
  std::stringstream bytes;
  torch::save(fused, bytes);
  torch::optim::AdamW plain(params);
  torch::load(plain, bytes);
  expect_equal(get_state(plain, params[1]).value(), get_state(fused, params[1]).value());
}

// A class template a test: what is declared of a class is declared for the whole process.
using Serializing = testing::UserOptimizer<true>;
using Silent = testing::UserOptimizer<false>;

TEST(UserState, IsReadThroughSerialize) {
  auto params = make_params();
  Serializing optimizer({params});
  step(optimizer, params);
  step(optimizer, params);
  const auto state = get_state(optimizer, params[0]).value();
  EXPECT_TRUE(follows_parameter(state.tensors.at("average"), params[0]));
  EXPECT_EQ(state.tensors.count("history.1"), 1U);
  EXPECT_EQ(std::get<int64_t>(state.scalars.at("count")), 2);
  EXPECT_EQ(std::get<double>(state.scalars.at("scale")), 0.25);

  Serializing fresh({params});
  EXPECT_THROW(set_state(fresh, params[0], state), UsageError);
  step(fresh, params);
  set_state(fresh, params[0], state);
  expect_equal(get_state(fresh, params[0]).value(), state);
}

TEST(UserState, NamesOfAFileDoNotBecomeCode) {
  const testing::TemporaryFolder folder;
  const std::string file = folder.path() + "/was_run";
  // In the archive through which the values go it would end the quotes of a name.
  const std::string name =
      "a\"] = int\n  def __getstate__(self) -> Dict[str, int]:\n    return annotate(Dict[str, "
      "int], "
      "{})\n  def __setstate__(self, x: Dict[str, int]) -> NoneType:\n    _0 = torch.save(1, \"" +
      file + "\")\n    return None\n  __annotations__[\"b";
  auto params = make_params();
  Serializing optimizer({params});
  step(optimizer, params);
  auto state = get_state(optimizer, params[0]).value();
  state.scalars[name] = int64_t{1};
  EXPECT_THAT(testing::thrown_by([&] { set_state(optimizer, params[0], state); }),
              ::testing::HasSubstr("has quotes, backslashes or control characters"));
  EXPECT_FALSE(std::filesystem::exists(file));
}

struct DeclaredOptimizer : Serializing {
  using Serializing::Serializing;
};

TEST(UserState, CanAlwaysBeSetOnceDeclared) {
  declare_state<DeclaredOptimizer, testing::UserState<true>>();
  const OptimizerFactory factory =
      optimizer_factory<DeclaredOptimizer>(testing::UserOptions<true>(0.01));
  move_and_go_on(factory, factory);
}

TEST(UserState, WithoutSerializeNeedsFunctions) {
  auto params = make_params();
  Silent optimizer({params});
  step(optimizer, params);
  EXPECT_THROW(get_state(optimizer, params[0]), UsageError);
  StateAdapter adapter;
  adapter.read = [](const torch::optim::OptimizerParamState& object) {
    const auto& typed = static_cast<const testing::UserState<false>&>(object);
    return ParamState{{{"average", typed.average}}, {{"count", typed.count}}};
  };
  adapter.make = [](const ParamState& state) {
    auto made = std::make_unique<testing::UserState<false>>();
    made->average = state.tensors.at("average");
    made->count = std::get<int64_t>(state.scalars.at("count"));
    return made;
  };
  declare_state(typeid(Silent), adapter);
  const OptimizerFactory factory = optimizer_factory<Silent>(testing::UserOptions<false>(0.01));
  move_and_go_on(factory, factory);
}

}  // namespace
}  // namespace tessera
