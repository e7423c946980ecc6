#include "tessera/optim/master_weights.h"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include "harness/models.h"
#include "harness/thrown_by.h"
#include "tessera/error.h"
#include "tessera/optim/optimizer_state.h"

// One process: the optimizer of with_master_weights() against one over float32 weights.

namespace tessera::master_weights {
namespace {

using testing::copies;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;
using Tensors = std::vector<at::Tensor>;

Tensors make_params(at::ScalarType dtype = at::kBFloat16) {
  torch::manual_seed(1);
  Tensors params{torch::randn({3, 4}), torch::randn({5})};
  for (auto& each : params) each = each.to(dtype).requires_grad_();
  params.push_back(torch::ones({2}).requires_grad_());  // float32 in any case
  return params;
}

OptimizerFactory plain(const std::string& name, const OptionMap& options = {{"lr", 0.05}}) {
  return default_optimizers().factory(name, options);
}

void set_gradients(const Tensors& params, int step) {
  for (size_t i = 0; i < params.size(); ++i)
    params[i].mutable_grad() =
        (params[i].detach().to(at::kFloat) * 0.5 + std::sin(step + static_cast<int>(i)))
            .to(params[i].scalar_type());
}

void step(torch::optim::Optimizer& optimizer, const Tensors& params, int number) {
  set_gradients(params, number);
  optimizer.step();
}

/// `params`, updated as float32 copies by an optimizer of `factory`, which are rounded after each
/// step.
struct Reference {
  Reference(const OptimizerFactory& factory, Tensors parameters) : params(std::move(parameters)) {
    for (const auto& each : params) masters.push_back(each.detach().to(at::kFloat).clone());
    optimizer = factory({OptimizerParamGroup(masters)});
  }
  void step(int number) {
    set_gradients(params, number);
    for (size_t i = 0; i < params.size(); ++i)
      masters[i].mutable_grad() =
          params[i].grad().defined() ? params[i].grad().to(at::kFloat) : at::Tensor();
    optimizer->step();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < params.size(); ++i) params[i].copy_(masters[i]);
  }

  Tensors params, masters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

void expect_equal(const Tensors& a, const Tensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << " " << i;
}

/// Loads copies, as state dicts do.
void move_states(const torch::optim::Optimizer& from, const Tensors& params,
                 torch::optim::Optimizer& to, const Tensors& others) {
  for (size_t i = 0; i < params.size(); ++i) {
    auto state = get_state(from, params[i]);
    if (!state) continue;
    for (auto& [name, tensor] : state->tensors) tensor = tensor.clone();
    set_state(to, others[i], *state);
  }
}

const std::map<std::string, OptionMap> kOptimizers{
    {"SGD", {{"lr", 0.05}}},
    {"torch.SGD", {{"lr", 0.05}, {"momentum", 0.9}}},
    {"Adam", {{"lr", 0.05}, {"amsgrad", true}}},
    {"AdamW", {{"lr", 0.05}}},
    {"Adagrad", {{"lr", 0.05}}},
    {"RMSprop", {{"lr", 0.05}, {"momentum", 0.5}}},
};

TEST(MasterWeights, HaveTheBitsOfFloat32AndGoOnFromAState) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const auto& [name, options] : kOptimizers) {
      const auto factory = with_master_weights(plain(name, options));
      Reference expected(plain(name, options), make_params(dtype));
      auto params = make_params(dtype);
      auto optimizer = factory({OptimizerParamGroup(params)});
      for (int i = 0; i < 4; ++i) {
        step(*optimizer, params, i);
        expected.step(i);
      }
      expect_equal(params, expected.params, name);
      EXPECT_TRUE(
          at::equal(get_state(*optimizer, params[0])->tensors.at("master"), expected.masters[0]))
          << name;

      auto others = copies(params);
      for (auto& each : others) each.requires_grad_();
      const auto next = factory({OptimizerParamGroup(others)});
      move_states(*optimizer, params, *next, others);
      for (int i = 4; i < 7; ++i) {
        step(*next, others, i);
        expected.step(i);
      }
      expect_equal(others, expected.params, name + " after load_state_dict()");
    }
  }
}

TEST(MasterWeights, GoOnFromAnArchive) {
  for (const std::string name : {"SGD", "AdamW"}) {
    const auto factory = with_master_weights(plain(name));
    Reference expected(plain(name), make_params());
    auto params = make_params();
    const auto optimizer = factory({OptimizerParamGroup(params)});
    for (int i = 0; i < 3; ++i) {
      step(*optimizer, params, i);
      expected.step(i);
    }
    std::stringstream file;
    torch::save(*optimizer, file);
    auto others = copies(params);
    for (auto& each : others) each.requires_grad_();
    const auto next = factory({OptimizerParamGroup(others)});
    torch::load(*next, file);
    step(*next, others, 3);
    expected.step(3);
    expect_equal(others, expected.params, name);
  }
}

TEST(MasterWeights, KeepUpdatesThatAreTooSmallForThe16Bits) {
  const auto slow = plain("SGD", {{"lr", 1e-4}});
  for (const bool masters : {false, true}) {
    const Tensors params{torch::ones({4}, at::kBFloat16).requires_grad_()};
    const auto optimizer =
        (masters ? with_master_weights(slow) : slow)({OptimizerParamGroup(params)});
    for (int i = 0; i < 100; ++i) {
      params[0].mutable_grad() = torch::ones({4}, at::kBFloat16);
      optimizer->step();
    }
    EXPECT_EQ(params[0][0].item<float>(), masters ? 0.98828125F : 1.0F);  // 0.99, rounded
  }
}

TEST(MasterWeights, FollowWhatAProgramDoesBetweenSteps) {
  auto params = make_params();
  const auto optimizer = with_master_weights(plain("AdamW"))({OptimizerParamGroup(params)});
  Reference expected(plain("AdamW"), make_params());
  const auto both = [&](int number) {
    step(*optimizer, params, number);
    expected.step(number);
    expect_equal(params, expected.params, "step " + std::to_string(number) + ": parameter");
  };
  both(0);
  {  // one element of one parameter
    const at::NoGradGuard no_grad;
    for (const auto* each : {&params, &expected.params, &expected.masters})
      (*each)[0].view(-1)[5].fill_(0);
  }
  both(1);
  for (auto* each : {optimizer.get(), expected.optimizer.get()})
    each->param_groups()[0].options().set_lr(0.5);
  both(2);
  params[1].set_requires_grad(false);  // without a gradient nothing changes
  const auto before = params[1].clone();
  set_gradients(params, 3);
  params[1].mutable_grad() = at::Tensor();
  optimizer->step();
  EXPECT_TRUE(at::equal(params[1], before));
}

TEST(MasterWeights, AreMadeForParametersThatAreAddedLater) {
  auto params = make_params();
  const auto optimizer = with_master_weights(plain("AdamW"))({OptimizerParamGroup({params[0]})});
  add_param_group(*optimizer, OptimizerParamGroup({params[1], params[2]}));
  Reference expected(plain("AdamW"), make_params());
  for (int i = 0; i < 3; ++i) {
    step(*optimizer, params, i);
    expected.step(i);
  }
  expect_equal(params, expected.params, "parameter");
  EXPECT_TRUE(get_state(*optimizer, params[1])->tensors.count("master"));
  EXPECT_FALSE(get_state(*optimizer, params[2])->tensors.count("master"));
}

TEST(MasterWeights, BeginAtTheParametersWithTheStateOfAnotherOptimizer) {
  auto params = make_params();
  const auto without = plain("AdamW")({OptimizerParamGroup(params)});
  step(*without, params, 0);
  const auto optimizer = with_master_weights(plain("AdamW"))({OptimizerParamGroup(params)});
  move_states(*without, params, *optimizer, params);
  const auto state = get_state(*optimizer, params[0]).value();
  EXPECT_TRUE(at::equal(state.tensors.at("master"), params[0].to(at::kFloat)));
  EXPECT_EQ(std::get<int64_t>(state.scalars.at("step")), 1);
}

TEST(MasterWeights, RefuseWhatTheyCannotDo) {
  auto params = make_params();
  EXPECT_THAT(testing::thrown_by(
                  [&] { with_master_weights(plain("LBFGS"))({OptimizerParamGroup(params)}); }),
              HasSubstr("with_master_weights: the optimizer is LBFGS"));
  const auto optimizer = with_master_weights(plain("AdamW"))({OptimizerParamGroup(params)});
  EXPECT_TRUE(is_element_wise(*optimizer));
  step(*optimizer, params, 0);
  auto state = get_state(*optimizer, params[0]).value();
  state.tensors["master"] = torch::ones({3});
  const std::string wrong = testing::thrown_by([&] { set_state(*optimizer, params[0], state); });
  EXPECT_THAT(wrong, HasSubstr("master is of [3], Float, cpu; expected [3, 4], Float, cpu"));

  const auto without = plain("AdamW")({OptimizerParamGroup(params)});
  EXPECT_THAT(
      testing::thrown_by([&] { move_states(*optimizer, params, *without, params); }),
      HasSubstr("unknown state \"master\"; it is of an optimizer of with_master_weights()"));
  step(*without, params, 0);
  std::stringstream file;
  torch::save(*without, file);
  EXPECT_THAT(testing::thrown_by([&] { torch::load(*optimizer, file); }),
              HasSubstr("the archive has no master weights"));
}

}  // namespace
}  // namespace tessera::master_weights
