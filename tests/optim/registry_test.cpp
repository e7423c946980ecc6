#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

std::vector<OptimizerParamGroup> one_group() {
  return {OptimizerParamGroup({torch::ones({3}).requires_grad_()})};
}

TEST(Registry, ConstructsTheFusedClassesAndLibtorchsOwn) {
  const auto registry = default_optimizers();
  EXPECT_THAT(registry.names(),
              ::testing::ElementsAre("Adagrad", "Adam", "AdamW", "LBFGS", "RMSprop", "SGD",
                                     "torch.Adam", "torch.AdamW", "torch.SGD"));
  for (const auto& name : registry.names()) {
    EXPECT_NE(registry.factory(name)(one_group()), nullptr);
    EXPECT_TRUE(registry.options_for(name)->get_lr() > 0);
  }
  EXPECT_NE(dynamic_cast<FusedAdamW*>(registry.factory("AdamW")(one_group()).get()), nullptr);
  EXPECT_NE(dynamic_cast<torch::optim::AdamW*>(registry.factory("torch.AdamW")(one_group()).get()),
            nullptr);
}

TEST(Registry, TakesOptionsAndIntegersForNumbers) {
  const auto optimizer = default_optimizers().factory(
      "AdamW", {{"lr", int64_t{1}}, {"betas", std::vector<double>{0.8, 0.95}}, {"amsgrad", true}})(
      one_group());
  const auto& options =
      static_cast<const torch::optim::AdamWOptions&>(optimizer->param_groups()[0].options());
  EXPECT_EQ(options.lr(), 1.0);
  EXPECT_EQ(std::get<1>(options.betas()), 0.95);
  EXPECT_TRUE(options.amsgrad());
  EXPECT_EQ(options.weight_decay(), 1e-2);
}

TEST(Registry, UnknownNamesAndOptionsNameTheNearest) {
  const auto registry = default_optimizers();
  EXPECT_THAT(error_of([&] { registry.factory("AdmaW"); }),
              AllOf(HasSubstr("AdmaW"), HasSubstr("\"AdamW\"")));
  EXPECT_THAT(error_of([&] {
                registry.factory("Adam", {{"weigth_decay", 0.1}});
              }),
              AllOf(HasSubstr("optimizer Adam"), HasSubstr("mean \"weight_decay\""),
                    HasSubstr("weigth_decay: unknown key")));
  EXPECT_THAT(error_of([&] {
                registry.factory("SGD", {{"learning_rte", 0.1}});
              }),
              AllOf(HasSubstr("learning_rte"), HasSubstr("known: lr, momentum")));
}

TEST(Registry, RefusesWrongTypesAndImpossibleValues) {
  const auto registry = default_optimizers();
  const auto refused = [&](const std::string& name, const std::string& option,
                           const OptionValue& value) {
    return error_of([&] { registry.factory(name, {{option, value}}); });
  };
  EXPECT_EQ(refused("Adam", "lr", -0.1), "optimizer Adam: lr: -0.1; expected a number >= 0");
  EXPECT_EQ(refused("Adam", "lr", std::string("fast")),
            "optimizer Adam: lr: the string \"fast\"; expected a number >= 0");
  EXPECT_THAT(refused("Adam", "lr", std::numeric_limits<double>::quiet_NaN()), HasSubstr("nan"));
  EXPECT_THAT(refused("AdamW", "betas", std::vector<double>{0.9, 1.0}),
              HasSubstr("betas: 1; expected two numbers >= 0 and < 1"));
  EXPECT_THAT(refused("AdamW", "betas", std::vector<double>{0.9}), HasSubstr("two numbers"));
  EXPECT_THAT(refused("AdamW", "betas", 0.9), HasSubstr("two numbers"));
  EXPECT_THAT(refused("RMSprop", "eps", -1.0), HasSubstr("eps"));
  EXPECT_THAT(refused("Adam", "amsgrad", int64_t{1}), HasSubstr("true or false"));
  EXPECT_THAT(refused("LBFGS", "max_iter", int64_t{0}), HasSubstr("a whole number >= 1"));
  EXPECT_THAT(refused("LBFGS", "line_search_fn", std::string("armijo")), HasSubstr("strong_wolfe"));
  EXPECT_THAT(refused("SGD", "nesterov", true), HasSubstr("momentum > 0"));
  EXPECT_EQ(refused("SGD", "dampening", -0.5), "no error");
  EXPECT_THROW(FusedAdam(std::vector<at::Tensor>{}, torch::optim::AdamOptions(-1)), UsageError);
}

TEST(Registry, UnsetOptionsStayUnset) {
  const auto registry = default_optimizers();
  EXPECT_EQ(registry.complete("LBFGS", {}).count("max_eval"), 0U);
  const auto options =
      registry.options_for("LBFGS", {{"line_search_fn", std::string("strong_wolfe")}});
  EXPECT_EQ(static_cast<torch::optim::LBFGSOptions&>(*options).line_search_fn().value(),
            "strong_wolfe");
}

struct OwnOptions : torch::optim::SGDOptions {
  OwnOptions() : SGDOptions(0.5) {}
  void read(OptionReader& options) { options.read("lr", lr(), "learning rate", kPositive); }
};

TEST(Registry, TakesOwnOptimizers) {
  auto registry = default_optimizers();
  registry.add<torch::optim::SGD, OwnOptions>("Mine");
  EXPECT_EQ(registry.factory("Mine")(one_group())->defaults().get_lr(), 0.5);
  EXPECT_EQ(registry.factory("Mine", {{"lr", 0.25}})(one_group())->defaults().get_lr(), 0.25);
  EXPECT_EQ(registry.complete("Mine"), (OptionMap{{"lr", 0.5}}));
  EXPECT_EQ(error_of([&] {
              registry.factory("Mine", {{"lr", 0.0}});
            }),
            "optimizer Mine: lr: 0; expected a number > 0");
  EXPECT_THROW((registry.add<torch::optim::SGD, OwnOptions>("Mine")), UsageError);
  EXPECT_FALSE(default_optimizers().contains("Mine"));
}

TEST(Registry, NamesTheOptimizersThatHaveAnOption) {
  EXPECT_EQ(error_of([] {
              default_optimizers().factory("Adam", {{"nesterov", true}});
            }),
            "optimizer Adam: nesterov: an option of SGD and torch.SGD, and type is Adam");
}

TEST(OptimizerFactory, GroupsKeepTheirOptionsAndOthersTakeTheDefaults) {
  const auto factory =
      optimizer_factory<torch::optim::Adam>(torch::optim::AdamOptions(0.5).weight_decay(0.25));
  auto groups = one_group();
  // Equal to a fresh object in all but eps: newer libtorch would take lr and weight_decay from the
  // defaults.
  groups.emplace_back(
      std::vector<at::Tensor>{torch::ones({2})},
      std::make_unique<torch::optim::AdamOptions>(torch::optim::AdamOptions().eps(1e-3)));
  for (int i = 0; i < 2; ++i) {
    const auto optimizer = factory(groups);
    EXPECT_EQ(get_options(optimizer->param_groups()[0].options()).at("lr"), OptionValue(0.5));
    const auto second = get_options(optimizer->param_groups()[1].options());
    EXPECT_EQ(second.at("lr"), OptionValue(1e-3));
    EXPECT_EQ(second.at("weight_decay"), OptionValue(0.0));
    EXPECT_EQ(second.at("eps"), OptionValue(1e-3));
  }
}

}  // namespace
}  // namespace tessera
