#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "optim/user_optimizer.h"
#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"
#include "tessera/optim/optimizer_state.h"

namespace tessera {
namespace {

using namespace torch::optim;

TEST(OptionText, ShowsEveryTypeAsYaml) {
  EXPECT_EQ(to_string(OptionValue(true)), "true");
  EXPECT_EQ(to_string(OptionValue(int64_t{3})), "3");
  EXPECT_EQ(to_string(OptionValue(0.1)), "0.1");
  EXPECT_EQ(to_string(OptionValue(std::string("a"))), "\"a\"");
  EXPECT_EQ(to_string(OptionValue(std::vector<double>{0.9, 0.95})), "[0.9, 0.95]");
}

template <class Options>
void round_trip(const Options& changed) {
  Options fresh(0.25), copied(0.75);
  set_options(fresh, get_options(changed));
  EXPECT_EQ(get_options(fresh), get_options(changed));
  EXPECT_TRUE(fresh == changed);
  copy_options(changed, copied);
  EXPECT_TRUE(copied == changed);
}

TEST(Options, RoundTripForEveryType) {
  round_trip(SGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.2));
  round_trip(AdamOptions(0.1).betas({0.5, 0.6}).eps(1e-3).weight_decay(0.2).amsgrad(true));
  round_trip(AdamWOptions(0.1).betas({0.5, 0.6}).eps(1e-3).weight_decay(0.2).amsgrad(true));
  round_trip(
      AdagradOptions(0.1).lr_decay(0.1).initial_accumulator_value(0.3).eps(1e-3).weight_decay(0.2));
  round_trip(
      RMSpropOptions(0.1).alpha(0.5).eps(1e-3).weight_decay(0.2).momentum(0.3).centered(true));
  round_trip(
      LBFGSOptions(0.1).max_iter(3).max_eval(4).history_size(5).line_search_fn("strong_wolfe"));
  round_trip(LBFGSOptions(0.1).tolerance_grad(0.5).tolerance_change(0.25));
}

TEST(Options, CopyUnsetsOptionsThatTheSourceLeavesUnset) {
  LBFGSOptions to(1);
  to.max_eval(7);
  copy_options(LBFGSOptions(1), to);
  EXPECT_FALSE(to.max_eval().has_value());
}

TEST(Options, SetChangesTheNamedOptionsOrNothing) {
  AdamOptions options(0.1);
  set_options(options, {{"lr", int64_t{2}}});
  EXPECT_EQ(options.lr(), 2);
  EXPECT_EQ(options.eps(), 1e-8);
  EXPECT_THROW(set_options(options, {{"eps", 0.5}, {"learning_rte", 0.5}}), UsageError);
  EXPECT_THROW(set_options(options, {{"eps", 0.5}, {"lr", true}}), UsageError);
  EXPECT_EQ(options.eps(), 1e-8);
  AdamWOptions other;
  EXPECT_THROW(copy_options(options, other), UsageError);
}

TEST(Options, UserDefinedOptionsAreReadThroughSerialize) {
  testing::UserOptions<true> options(0.5), other(0.1);
  options.loud = true;
  options.range = {3, 4};
  const OptionMap expected{{"lr", 0.5}, {"loud", true}, {"range", std::vector<double>{3, 4}}};
  EXPECT_EQ(get_options(options), expected);
  set_options(other, {{"range", std::vector<double>{3, 4}}, {"loud", true}});
  EXPECT_EQ(std::get<1>(other.range), 4);
  EXPECT_EQ(other.rate, 0.1);
  copy_options(options, other);
  EXPECT_EQ(get_options(other), expected);
  EXPECT_THROW(set_options(other, {{"lodu", true}}), UsageError);
}

TEST(Options, UserDefinedOptionsWithoutSerializeHaveALearningRate) {
  testing::UserOptions<false> options(0.5), other(0.1);
  EXPECT_EQ(get_options(options), (OptionMap{{"lr", 0.5}}));
  set_options(options, {{"lr", 0.25}});
  EXPECT_EQ(options.rate, 0.25);
  EXPECT_THROW(copy_options(options, other), UsageError);
  options.loud = true;
  OptimizerParamGroup from({}, std::make_unique<testing::UserOptions<false>>(options));
  OptimizerParamGroup to({}, std::make_unique<testing::UserOptions<false>>(other));
  copy_options(from, to);
  EXPECT_TRUE(static_cast<testing::UserOptions<false>&>(to.options()).loud);
}

class MarkedSGD : public torch::optim::SGD, public ElementWise {
  using torch::optim::SGD::SGD;
};
class DerivedSGD : public torch::optim::SGD {
  using torch::optim::SGD::SGD;
};

TEST(ElementWise, IsKnownOrDeclared) {
  const std::vector<at::Tensor> params{torch::ones({2})};
  EXPECT_TRUE(is_element_wise(SGD(params, SGDOptions(1))));
  EXPECT_TRUE(is_element_wise(Adam(params)));
  EXPECT_TRUE(is_element_wise(AdamW(params)));
  EXPECT_TRUE(is_element_wise(Adagrad(params)));
  EXPECT_TRUE(is_element_wise(RMSprop(params)));
  EXPECT_TRUE(is_element_wise(FusedAdamW(params)));
  EXPECT_TRUE(is_element_wise(MarkedSGD(params, SGDOptions(1))));
  EXPECT_FALSE(is_element_wise(LBFGS(params)));
  EXPECT_FALSE(is_element_wise(DerivedSGD(params, SGDOptions(1))));
  declare_element_wise<DerivedSGD>();
  EXPECT_TRUE(is_element_wise(DerivedSGD(params, SGDOptions(1))));
}

}  // namespace
}  // namespace tessera
