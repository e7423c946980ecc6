#include "train/state/saved_state.h"

#include <cmath>

#include <gmock/gmock.h>

#include "harness/thrown_by.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

SavedState full_state() {
  SavedState state;
  state.step = 7;
  state.global_batch = 12;
  state.data = {84, 600, SampleOrder::sequential, 18446744073709551615u};
  state.models[""] = {
      "ZeroRedundancyOptimizer", "AdamW", {{32768, 5}}, {{"z", "1"}, {"activation", "gelu"}}, 6};
  state.ranks = 3;
  state.best.early_stop = {0.1, 2, false};
  state.best.weights = {5, 0.25};
  state.best.kept = {"accuracy", true, {{4, 0.5}, {2, 0.125}}};
  StepRecord record;
  record.step = 6;
  record.loss = 0.1;
  record.grad_norm = std::nan("");
  record.lr = 1e-3;
  record.ms = 3.25;
  record.samples = 12;
  record.tokens = 192;
  record.epoch = 0.14;
  record.loss_scale = 32768;
  record.figures = {{"loss", 0.1}, {"accuracy", std::nan("")}};
  state.evaluation_due = record;
  state.local_sgd = {{"groups", 2}, {"under_way", true}};
  state.left_out = {3, 5};
  state.best_eval_loss = 0.3;
  state.hooks = {"", "a \"text\"\n"};
  return state;
}

TEST(SavedState, EveryFieldComesBack) {
  const SavedState all = full_state(), back = saved_state_of(to_text(all), "c/state.json");
  EXPECT_EQ(to_text(back), to_text(all));
  EXPECT_EQ(back.step, 7);
  EXPECT_EQ(back.global_batch, 12);
  EXPECT_EQ(back.data.position, 84);
  EXPECT_EQ(back.data.size, 600);
  EXPECT_EQ(back.data.order, SampleOrder::sequential);
  EXPECT_EQ(back.data.seed, 18446744073709551615u);
  const SavedModel& model = back.models.at("");
  EXPECT_EQ(model.parallel + " " + model.optimizer, "ZeroRedundancyOptimizer AdamW");
  EXPECT_EQ(back.ranks, 3);
  EXPECT_EQ(model.loss_scale.value().growth_tracker, 5);
  EXPECT_EQ(back.best.early_stop.value().best, 0.1);
  EXPECT_EQ(back.best.early_stop.value().waited, 2);
  EXPECT_EQ(back.best.weights.value().step, 5);
  EXPECT_EQ(back.best.weights.value().value, 0.25);
  const KeptSteps& kept = back.best.kept.value();
  EXPECT_EQ(kept.metric, "accuracy");
  EXPECT_TRUE(kept.larger);
  ASSERT_EQ(kept.steps.size(), 2u);
  EXPECT_EQ(kept.steps[1].step, 2);
  EXPECT_EQ(kept.steps[1].value, 0.125);
  EXPECT_EQ(model.meaning, all.models.at("").meaning) << "in their order";
  EXPECT_EQ(back.evaluation_due.value().step, 6);
  EXPECT_EQ(back.evaluation_due.value().ms, 3.25);
  EXPECT_TRUE(std::isnan(back.evaluation_due.value().grad_norm));
  EXPECT_EQ(back.evaluation_due.value().figures[0].second, 0.1);
  EXPECT_TRUE(std::isnan(back.evaluation_due.value().figures[1].second));
  EXPECT_EQ(model.average_updates, 6);
  EXPECT_EQ(back.local_sgd, all.local_sgd);
  EXPECT_EQ(back.left_out, all.left_out);
  EXPECT_EQ(back.best_eval_loss, 0.3);
  EXPECT_EQ(back.hooks, all.hooks);
}

TEST(SavedState, SeveralModelsComeBackByName) {
  SavedState state = full_state();
  state.models = {{"actor", {"FullyShardedDataParallel", "SGD"}},
                  {"critic", {"none", "AdamW", {{8, 1}}, {{"z", "2"}}, 3}}};
  const SavedState back = saved_state_of(to_text(state), "");
  ASSERT_EQ(back.models.size(), 2u);
  EXPECT_EQ(back.models.at("actor").optimizer, "SGD");
  EXPECT_FALSE(back.models.at("actor").loss_scale || back.models.at("actor").average_updates);
  EXPECT_EQ(back.models.at("critic").loss_scale.value().scale, 8);
  EXPECT_EQ(back.models.at("critic").meaning[0].second, "2");
  EXPECT_EQ(back.models.at("critic").average_updates, 3);
}

TEST(SavedState, WhatIsNotPartOfTheRunStaysOut) {
  SavedState state;
  state.data.size = 10;
  state.models[""] = {};
  const std::string text = to_text(state);
  for (const char* key : {"loss_scale", "early_stop", "evaluation_due", "weight_average_updates",
                          "local_sgd", "left_out", "best_eval_loss"})
    EXPECT_EQ(text.find(key), std::string::npos) << key;
  EXPECT_EQ(to_text(saved_state_of(text, "")), text);
}

TEST(SavedState, AStopThatHasSeenNothingHasNoBestValue) {
  SavedState state;
  state.best.early_stop = EarlyStop::State{{}, 1, true};
  const SavedState back = saved_state_of(to_text(state), "");
  EXPECT_FALSE(back.best.early_stop.value().best);
  EXPECT_TRUE(back.best.early_stop.value().stopped);
}

TEST(SavedState, AMissingBatchIsComputedFromSamplesAndSteps) {
  const std::string data = R"("data": {"size": 9, "order": "shuffled", "seed": 1}, "hooks": [])";
  EXPECT_EQ(saved_state_of(R"({"step": 3, "samples": 36, )" + data + "}", "").global_batch, 12);
  EXPECT_EQ(saved_state_of(R"({"step": 0, "samples": 0, )" + data + "}", "").global_batch, 0);
}

TEST(SavedState, AnErrorNamesTheFile) {
  for (const std::string text : {"", "{", "[]", "{}", R"({"step": "seven"})"}) {
    EXPECT_THAT(testing::thrown_by([&] { saved_state_of(text, "c/state.json"); }),
                HasSubstr("c/state.json: "))
        << text;
  }
}

}  // namespace
}  // namespace tessera::train
