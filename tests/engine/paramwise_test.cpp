#include "tessera/step/paramwise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include "harness/thrown_by.h"
#include "tessera/optim.h"
#include "tessera/step/sync_batch_norm.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::thrown_by;

/// One parameter of each kind that a rule applies to, and a parameter of one dimension to which no
/// other rule applies.
struct KindsImpl : torch::nn::Module {
  KindsImpl() {
    scale = register_parameter("scale", torch::ones({4}));
    backbone = register_module("backbone", torch::nn::Sequential());
    backbone->push_back("conv", torch::nn::Conv2d(4, 4, 3));
    backbone->push_back("dwconv", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 8, 3).groups(4)));
    backbone->push_back("norm", torch::nn::BatchNorm2d(8));
    head = register_module("head", torch::nn::Linear(8, 2));
  }
  torch::Tensor scale;
  torch::nn::Sequential backbone{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Kinds);

const OptionMap kBase{{"lr", 1.0}, {"weight_decay", 0.5}, {"eps", 1e-8}};

double number(const OptionMap& options, const std::string& name) {
  return std::get<double>(options.at(name));
}

/// One option of every parameter, by name.
std::map<std::string, double> option_by_name(const torch::nn::Module& module,
                                             const ParamwiseOptions& options,
                                             const std::string& option) {
  std::map<std::string, double> result;
  for (const auto& group : paramwise_groups(module, options, kBase))
    for (const auto& [name, tensor] : group.parameters)
      EXPECT_TRUE(result.emplace(name, number(group.options, option)).second) << name;
  return result;
}

using Values = std::map<std::string, double>;

/// `special`, and the value `rest` for every other parameter of Kinds.
Values kinds(double rest, const Values& special) {
  Values values = special;
  for (const auto& parameter : Kinds()->named_parameters()) values.emplace(parameter.key(), rest);
  return values;
}

TEST(Paramwise, WithoutRulesThereIsOneGroupInOrder) {
  Kinds net;
  const auto groups = paramwise_groups(*net, {}, kBase);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].options, kBase);
  const auto names = named_parameters(*net);
  ASSERT_EQ(groups[0].parameters.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(groups[0].parameters[i].first, names[i].first);
    EXPECT_TRUE(groups[0].parameters[i].second.is_same(names[i].second));
  }
}

TEST(Paramwise, EqualOptionsShareAGroupInTheOrderOfTheFirst) {
  const auto groups = paramwise_groups(
      *Kinds(),
      {.custom_keys = {{"conv", {.decay_mult = 0}}, {"head.weight", {.decay_mult = 0.0}}}}, kBase);
  ASSERT_EQ(groups.size(), 2u);
  std::vector<std::string> first, second;
  for (const auto& [name, tensor] : groups[0].parameters) first.push_back(name);
  for (const auto& [name, tensor] : groups[1].parameters) second.push_back(name);
  EXPECT_THAT(first,
              ElementsAre("scale", "backbone.norm.weight", "backbone.norm.bias", "head.bias"));
  EXPECT_THAT(second, ElementsAre("backbone.conv.weight", "backbone.conv.bias",
                                  "backbone.dwconv.weight", "backbone.dwconv.bias", "head.weight"));
}

TEST(Paramwise, BiasLrMultExcludesNormalisations) {
  EXPECT_EQ(option_by_name(*Kinds(), {.bias_lr_mult = 2}, "lr"),
            kinds(1, {{"backbone.conv.bias", 2}, {"backbone.dwconv.bias", 2}, {"head.bias", 2}}));
  EXPECT_EQ(option_by_name(*Kinds(), {.bias_lr_mult = 2}, "weight_decay"), kinds(0.5, {}));
}

TEST(Paramwise, BiasDecayMultAppliesToEveryBias) {
  EXPECT_EQ(option_by_name(*Kinds(), {.bias_decay_mult = 2}, "weight_decay"),
            kinds(0.5, {{"backbone.conv.bias", 1},
                        {"backbone.dwconv.bias", 1},
                        {"backbone.norm.bias", 1},
                        {"head.bias", 1}}));
}

TEST(Paramwise, NormDecayMultAppliesToNormalisations) {
  EXPECT_EQ(option_by_name(*Kinds(), {.norm_decay_mult = 0}, "weight_decay"),
            kinds(0.5, {{"backbone.norm.weight", 0}, {"backbone.norm.bias", 0}}));
}

TEST(Paramwise, DwconvDecayMultAppliesToDepthWiseConvolutions) {
  EXPECT_EQ(option_by_name(*Kinds(), {.dwconv_decay_mult = 0}, "weight_decay"),
            kinds(0.5, {{"backbone.dwconv.weight", 0}, {"backbone.dwconv.bias", 0}}));
}

TEST(Paramwise, FlatDecayMultAppliesToParametersOfOneDimension) {
  EXPECT_EQ(option_by_name(*Kinds(), {.flat_decay_mult = 0}, "weight_decay"),
            kinds(0, {{"backbone.conv.weight", 0.5},
                      {"backbone.dwconv.weight", 0.5},
                      {"head.weight", 0.5}}));
}

TEST(Paramwise, DecayIsDecidedByNormThenBiasThenDepthWiseThenFlat) {
  EXPECT_EQ(option_by_name(*Kinds(),
                           {.bias_decay_mult = 4,
                            .norm_decay_mult = 2,
                            .flat_decay_mult = 16,
                            .dwconv_decay_mult = 8},
                           "weight_decay"),
            kinds(0.5, {{"scale", 8},
                        {"backbone.conv.bias", 2},
                        {"backbone.dwconv.weight", 4},
                        {"backbone.dwconv.bias", 2},
                        {"backbone.norm.weight", 1},
                        {"backbone.norm.bias", 1},
                        {"head.bias", 2}}));
  // If a rule has no multiplier, the next rule decides.
  EXPECT_EQ(
      option_by_name(*Kinds(), {.flat_decay_mult = 16, .dwconv_decay_mult = 8}, "weight_decay")
          .at("backbone.dwconv.bias"),
      4);
  EXPECT_EQ(option_by_name(*Kinds(), {.bias_decay_mult = 4, .flat_decay_mult = 16}, "weight_decay")
                .at("backbone.norm.bias"),
            2);
  EXPECT_EQ(option_by_name(*Kinds(), {.bias_decay_mult = 4, .flat_decay_mult = 16}, "weight_decay")
                .at("backbone.norm.weight"),
            8);
}

TEST(Paramwise, ACustomKeyOverridesAllRules) {
  const ParamwiseOptions options{.custom_keys = {{"norm", {.lr_mult = 3}}},
                                 .bias_lr_mult = 5,
                                 .bias_decay_mult = 4,
                                 .norm_decay_mult = 0,
                                 .flat_decay_mult = 0};
  const auto lr = option_by_name(*Kinds(), options, "lr"),
             decay = option_by_name(*Kinds(), options, "weight_decay");
  for (const char* name : {"backbone.norm.weight", "backbone.norm.bias"}) {
    EXPECT_EQ(lr.at(name), 3);
    EXPECT_EQ(decay.at(name), 0.5);
  }
  EXPECT_EQ(lr.at("head.bias"), 5);
}

TEST(Paramwise, ACustomKeyCopiesAllItsOptions) {
  const ParamwiseOptions options{
      .custom_keys = {
          {"head", {.lr_mult = 3, .decay_mult = 0, .options = {{"eps", 1e-3}, {"amsgrad", true}}}},
          {"scale", {.lr_mult = 3, .options = {{"lr", int64_t{7}}}}}}};
  const auto groups = paramwise_groups(*Kinds(), options, kBase);
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].options, (OptionMap{{"lr", 7.0}, {"weight_decay", 0.5}, {"eps", 1e-8}}));
  EXPECT_EQ(groups[1].options, kBase);
  EXPECT_EQ(groups[2].options,
            (OptionMap{{"lr", 3.0}, {"weight_decay", 0.0}, {"eps", 1e-3}, {"amsgrad", true}}));
  EXPECT_EQ(default_optimizers().options_for("Adam", groups[2].options)->get_lr(), 3);
}

TEST(Paramwise, TheLongestKeyIsUsedThenTheAlphabeticallyFirst) {
  const ParamwiseOptions options{.custom_keys = {{"backbone", {.lr_mult = 2}},
                                                 {"backbone.dwconv", {.lr_mult = 3}},
                                                 {"t", {.lr_mult = 9}},
                                                 {"head.weigh", {.lr_mult = 6}},
                                                 {"ead.weight", {.lr_mult = 5}}}};
  const auto lr = option_by_name(*Kinds(), options, "lr");
  EXPECT_EQ(lr.at("backbone.conv.weight"), 2);
  EXPECT_EQ(lr.at("backbone.dwconv.weight"), 3);
  EXPECT_EQ(lr.at("head.weight"), 5);
}

TEST(Paramwise, KeysAreSubstringsAndALeadingDotMatchesTheWholeLastPart) {
  EXPECT_EQ(option_by_name(*Kinds(), {.custom_keys = {{"e.norm.w", {.lr_mult = 2}}}}, "lr"),
            kinds(1, {{"backbone.norm.weight", 2}}));
  EXPECT_EQ(option_by_name(*Kinds(), {.custom_keys = {{".scale", {.lr_mult = 2}}}}, "lr"),
            kinds(1, {{"scale", 2}}));
}

TEST(Paramwise, AKeyThatMatchesNothingIsAnErrorThatSuggestsTheNearest) {
  const auto with_key = [](const std::string& key) {
    return thrown_by([&] {
      paramwise_groups(*Kinds(), {.custom_keys = {{key, {.lr_mult = 2}}}}, kBase);
    });
  };
  EXPECT_EQ(with_key("bakcbone"),
            "paramwise: custom_keys: \"bakcbone\" is part of no parameter's name; did you mean "
            "\"backbone\"?");
  EXPECT_THAT(with_key("backbone.dwcnv"), HasSubstr("did you mean \"backbone.dwconv\"?"));
  EXPECT_THAT(with_key("nrom.weight"), HasSubstr("did you mean \"norm.weight\"?"));
  EXPECT_THAT(with_key(""), HasSubstr("an empty key"));
  // Longer keys may be used for every parameter that a shorter key matches.
  EXPECT_EQ(
      option_by_name(*Kinds(),
                     {.custom_keys = {{"hea", {.lr_mult = 2}}, {"head.", {.lr_mult = 3}}}}, "lr")
          .at("head.bias"),
      3);
}

TEST(Paramwise, FrozenParametersGetTheBaseOptions) {
  Kinds net;
  net->head->bias.set_requires_grad(false);
  const auto lr = option_by_name(
      *net, {.custom_keys = {{"head.bias", {.lr_mult = 3}}}, .bias_lr_mult = 2}, "lr");
  EXPECT_EQ(lr.at("head.bias"), 1);
  EXPECT_EQ(lr.at("backbone.conv.bias"), 2);
}

TEST(Paramwise, DuplicatesAreAnErrorUnlessBypassed) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      const torch::nn::Linear shared(2, 2);
      register_module("encoder", shared);
      register_module("decoder", shared);
    }
  } tied;
  EXPECT_THAT(thrown_by([&] { paramwise_groups(tied, {}, kBase); }),
              AllOf(HasSubstr("decoder.weight is the same tensor as encoder.weight"),
                    HasSubstr("bypass_duplicate")));
  EXPECT_EQ(
      option_by_name(tied, {.custom_keys = {{"decoder", {.lr_mult = 2}}}, .bypass_duplicate = true},
                     "lr"),
      (Values{{"encoder.weight", 1}, {"encoder.bias", 1}}));
}

TEST(Paramwise, AMultiplierOfAMissingOptionIsAnError) {
  const auto without = [](const std::string& option, const ParamwiseOptions& options) {
    auto base = kBase;
    base.erase(option);
    return thrown_by([&] { paramwise_groups(*Kinds(), options, base); });
  };
  const auto no_decay = [&](const ParamwiseOptions& options) {
    return without("weight_decay", options);
  };
  EXPECT_EQ(
      no_decay({.norm_decay_mult = 0}),
      "paramwise: option norm_decay_mult = 0, but the optimizer has no weight_decay to multiply");
  EXPECT_THAT(no_decay({.bias_decay_mult = 0}), HasSubstr("bias_decay_mult"));
  EXPECT_THAT(no_decay({.flat_decay_mult = 0}), HasSubstr("flat_decay_mult"));
  EXPECT_THAT(no_decay({.dwconv_decay_mult = 0}), HasSubstr("dwconv_decay_mult"));
  EXPECT_THAT(no_decay({.custom_keys = {{"head", {.decay_mult = 0}}}}),
              HasSubstr("custom_keys.head.decay_mult"));
  EXPECT_EQ(no_decay({.custom_keys = {{"head", {.lr_mult = 2}}}, .bias_lr_mult = 2}), "no error");
  EXPECT_THAT(without("lr", {.bias_lr_mult = 2}), HasSubstr("no lr to multiply"));
  EXPECT_THAT(without("lr", {.custom_keys = {{"head", {.lr_mult = 2}}}}),
              HasSubstr("custom_keys.head.lr_mult"));
}

TEST(Paramwise, MultipliersOutOfRangeAreNamed) {
  EXPECT_EQ(thrown_by([] { paramwise_groups(*Kinds(), {.flat_decay_mult = -1}, kBase); }),
            "paramwise: flat_decay_mult: -1; expected a number >= 0");
  EXPECT_THAT(thrown_by([] {
                paramwise_groups(*Kinds(), {.custom_keys = {{"head", {.lr_mult = -2}}}}, kBase);
              }),
              HasSubstr("custom_keys.head.lr_mult: -2"));
  EXPECT_THAT(thrown_by([] {
                paramwise_groups(*Kinds(), {.bias_lr_mult = 2}, {{"lr", std::string("fast")}});
              }),
              HasSubstr("lr = \"fast\", expected a number"));
}

TEST(Paramwise, AnIntegerRateIsANumber) {
  const auto groups = paramwise_groups(*Kinds(), {.bias_lr_mult = 1}, {{"lr", int64_t{2}}});
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(number(groups[0].options, "lr"), 2);
}

/// Two flags: the "weight" of `module` is treated as a normalisation's, and as a depth-wise
/// convolution's.
template <class Module>
std::pair<bool, bool> kind_of(Module module) {
  torch::nn::Sequential net;
  net->push_back("layer", module);
  const auto decay =
      option_by_name(*net, {.norm_decay_mult = 2, .dwconv_decay_mult = 4}, "weight_decay")
          .at("layer.weight");
  return {decay == 1, decay == 2};
}

struct OwnNormImpl : torch::nn::LayerNormImpl {
  OwnNormImpl() : LayerNormImpl(torch::nn::LayerNormOptions({4})) {}
};

TEST(Paramwise, KnowsTheNormalisations) {
  using namespace torch::nn;
  const std::pair norm(true, false);
  EXPECT_EQ(kind_of(BatchNorm1d(4)), norm);
  EXPECT_EQ(kind_of(BatchNorm2d(4)), norm);
  EXPECT_EQ(kind_of(BatchNorm3d(4)), norm);
  EXPECT_EQ(kind_of(InstanceNorm1d(InstanceNorm1dOptions(4).affine(true))), norm);
  EXPECT_EQ(kind_of(InstanceNorm2d(InstanceNorm2dOptions(4).affine(true))), norm);
  EXPECT_EQ(kind_of(InstanceNorm3d(InstanceNorm3dOptions(4).affine(true))), norm);
  EXPECT_EQ(kind_of(LayerNorm(LayerNormOptions({4}))), norm);
  EXPECT_EQ(kind_of(GroupNorm(2, 4)), norm);
  EXPECT_EQ(kind_of(ModuleHolder<SyncBatchNormImpl>(BatchNormOptions(4), ProcessGroup())), norm);
  EXPECT_EQ(kind_of(ModuleHolder<OwnNormImpl>(std::make_shared<OwnNormImpl>())), norm);
  EXPECT_EQ(kind_of(Linear(4, 4)), std::pair(false, false));
}

TEST(Paramwise, KnowsDepthWiseConvolutions) {
  using namespace torch::nn;
  const std::pair depth_wise(false, true), other(false, false);
  EXPECT_EQ(kind_of(Conv1d(Conv1dOptions(4, 4, 3).groups(4))), depth_wise);
  EXPECT_EQ(kind_of(Conv2d(Conv2dOptions(4, 8, 3).groups(4))), depth_wise);
  EXPECT_EQ(kind_of(Conv3d(Conv3dOptions(4, 4, 3).groups(4))), depth_wise);
  EXPECT_EQ(kind_of(Conv2d(Conv2dOptions(4, 4, 3).groups(2))), other);
  EXPECT_EQ(kind_of(Conv2d(Conv2dOptions(1, 4, 3))), other);
}

}  // namespace
}  // namespace tessera
