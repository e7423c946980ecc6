#include "train/step/fault_policy.h"

#include <cmath>

#include <gtest/gtest.h>

namespace tessera::train {
namespace {

TEST(FaultPolicy, AGoodStepIsUpdated) {
  FaultPolicy policy;
  EXPECT_TRUE(policy.may_update(2));
  const Decision decision = policy.decide(2, 0.5);
  EXPECT_EQ(decision.fault, Fault::none);
  EXPECT_EQ(decision.verdict, Verdict::update);
}

TEST(FaultPolicy, ALossThatIsNotFiniteIsNotUpdatedUnlessTheNormIsTheError) {
  for (const double loss : {NAN, INFINITY, -INFINITY}) {
    EXPECT_FALSE(FaultPolicy().may_update(loss));
    FaultRules rules;
    rules.norm_is_error = true;
    EXPECT_TRUE(FaultPolicy(rules).may_update(loss));
  }
}

TEST(FaultPolicy, TheRuleIsTheVerdictOnLossesAndGradients) {
  for (const Verdict rule : {Verdict::stop, Verdict::skip, Verdict::roll_back}) {
    FaultRules rules;
    rules.on_nonfinite = rule;
    FaultPolicy policy(rules);
    const Decision loss = policy.decide(NAN, NAN), gradient = policy.decide(2, INFINITY);
    EXPECT_EQ(loss.fault, Fault::loss);
    EXPECT_EQ(loss.verdict, rule);
    EXPECT_EQ(gradient.fault, Fault::gradient);
    EXPECT_EQ(gradient.verdict, rule);
  }
}

TEST(FaultPolicy, ANormThatOverflowsUnderLossScalingIsNoFault) {
  FaultRules rules;
  rules.norm_may_overflow = true;
  EXPECT_EQ(FaultPolicy(rules).decide(2, INFINITY).verdict, Verdict::update);
  EXPECT_EQ(FaultPolicy(rules).decide(NAN, INFINITY).fault, Fault::loss);
}

TEST(FaultPolicy, OneSkipTooManyInARowStops) {
  FaultRules rules;
  rules.on_nonfinite = Verdict::skip;
  rules.most_skips = 2;
  FaultPolicy policy(rules);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(policy.decide(NAN, NAN).verdict, Verdict::skip);
    EXPECT_EQ(policy.decide(NAN, NAN).verdict, Verdict::skip);
    EXPECT_EQ(policy.decide(2, 1).verdict, Verdict::update) << "the count begins again";
  }
  policy.decide(NAN, NAN);
  policy.decide(NAN, NAN);
  EXPECT_EQ(policy.decide(NAN, NAN).verdict, Verdict::stop);
}

TEST(FaultPolicy, ASpikeIsRolledBackUnderEveryRuleAndIsNotInTheMedian) {
  FaultRules rules;
  rules.spike = 3;
  FaultPolicy policy(rules);
  for (int step = 0; step < 19; ++step) policy.decide(step % 2 == 0 ? 1 : 2, 1);
  EXPECT_TRUE(policy.may_update(100)) << "19 losses are too few";
  policy.decide(2, 1);
  EXPECT_EQ(policy.median(), 2);
  EXPECT_TRUE(policy.may_update(6));
  EXPECT_FALSE(policy.may_update(6.1));
  const Decision decision = policy.decide(6.1, NAN);
  EXPECT_EQ(decision.fault, Fault::spike);
  EXPECT_EQ(decision.verdict, Verdict::roll_back);
  EXPECT_EQ(policy.losses(), 20u);
}

TEST(FaultPolicy, NegativeLossesAreNoSpikes) {
  FaultRules rules;
  rules.spike = 3;
  FaultPolicy policy(rules);
  for (int step = 0; step < 20; ++step) policy.decide(-2, 1);
  EXPECT_TRUE(policy.may_update(-2));
  EXPECT_TRUE(policy.may_update(2)) << "twice the median's size above it, as 6 is above 2";
  EXPECT_FALSE(policy.may_update(2.1));
}

TEST(FaultPolicy, TheMedianIsOfTheLastHundredGoodSteps) {
  FaultPolicy policy;
  for (int step = 0; step < 100; ++step) policy.decide(1000, 1);
  for (int step = 0; step < 51; ++step) policy.decide(1, 1);
  EXPECT_EQ(policy.losses(), 100u);
  EXPECT_EQ(policy.median(), 1);
}

}  // namespace
}  // namespace tessera::train
