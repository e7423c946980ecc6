// Cases in which the fuzzer has found a fault, as it has shrunk them.

#include <gtest/gtest.h>

#include "fuzz/training/worker.h"

namespace tessera::fuzz {
namespace {

void expect_sound(const Case& which) {
  const auto finding = run_case(which);
  if (finding) ADD_FAILURE() << finding->kind << ": " << finding->text;
}

// The rank that skipped nothing saw a lost peer: the error of an asynchronous collective was not
// thrown by the next collective.
TEST(TrainingFuzz, ZeroBesideDdpSkippedBackward) {
  expect_sound({.seed = 44,
                .world = 2,
                .dtype = "float",
                .layers = {{"linear"}},
                .optimizer = {"AdamW", {{"lr", "0.02"}}},
                .wrapper = {"ddp_zero", {{"find_unused", "1"}}},
                .story = {{"step", {{"absent", "1"}}}, {"step"}}});
}

// fail() on all ranks at once, with reductions in the queue.
TEST(TrainingFuzz, DdpFrozenWithQueuedBuckets) {
  expect_sound({.seed = 1025,
                .world = 4,
                .dtype = "double",
                .layers = {{"module_dict"}, {"module_dict", {{"out", "4"}}}},
                .optimizer = {"Adagrad", {{"lr", "0.02"}}},
                .wrapper = {"ddp", {{"first_bucket_mb", "0.0001"}}},
                .story = {{"freeze"}, {"step", {{"clip", "norm"}}}}});
}

// A parameter that was frozen at construction and thawed later was trained by each rank alone.
TEST(TrainingFuzz, DdpThawed) {
  expect_sound({.seed = 1126,
                .world = 2,
                .dtype = "double",
                .layers = {{"views", {{"frozen", "1"}}}},
                .optimizer = {"Adagrad", {{"lr", "0.02"}}},
                .wrapper = {"ddp"},
                .story = {{"thaw"}, {"step"}}});
}

// The same in a join.
TEST(TrainingFuzz, DdpThawedInJoin) {
  expect_sound({.seed = 1050,
                .world = 2,
                .dtype = "float",
                .layers = {{"conv2d", {{"frozen", "1"}}}},
                .optimizer = {"Adam", {{"lr", "0.02"}}},
                .wrapper = {"ddp"},
                .story = {{"thaw"}, {"join", {{"batches", "12"}}}}});
}

// Two parameter groups of one process group started their reductions in another order on a rank
// without data.
TEST(TrainingFuzz, DistributedOptimizerTwoGroupsInJoin) {
  expect_sound({.seed = 1356,
                .world = 2,
                .dtype = "float",
                .layers = {},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"distributed_optimizer", {{"groups", "2"}}},
                .story = {{"join", {{"batches", "1303"}}}, {"step", {{"state", "1"}}}}});
}

// The same where a rank uses fewer parameters.
TEST(TrainingFuzz, DistributedOptimizerTwoGroupsPartlyUsed) {
  expect_sound({.seed = 1387,
                .world = 2,
                .dtype = "float",
                .layers = {{"conditional"}},
                .optimizer = {"AdamW", {{"lr", "0.02"}}},
                .wrapper = {"distributed_optimizer", {{"groups", "2"}}},
                .story = {{"step", {{"branch", "rank0"}}}}});
}

// Gradients of different steps were averaged until the end of the run.
TEST(TrainingFuzz, DistributedOptimizerSkippedBackward) {
  expect_sound({.seed = 3524,
                .world = 3,
                .dtype = "float",
                .layers = {},
                .optimizer = {"SGD", {{"lr", "0.02"}, {"momentum", "0.9"}}},
                .wrapper = {"distributed_optimizer"},
                .story = {{"step", {{"absent", "1"}}},
                          {"step"},
                          {"step"},
                          {"step"},
                          {"step"},
                          {"step"},
                          {"step"}}});
}

// A learning rate of its own on one rank was not noticed.
TEST(TrainingFuzz, DistributedOptimizerOtherLr) {
  expect_sound({.seed = 97,
                .world = 2,
                .dtype = "float",
                .layers = {},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"distributed_optimizer"},
                .story = {{"lr", {{"rank", "0"}}}, {"step"}, {"step"}}});
}

// Only the rank that came first had the reason; the others saw a lost peer.
TEST(TrainingFuzz, DistributedOptimizerThawedOnWaitingRanks) {
  expect_sound({.seed = 3687,
                .world = 4,
                .dtype = "float",
                .layers = {{"linear"}, {"linear"}, {"conv_transpose1d", {{"frozen", "1"}}}},
                .optimizer = {"AdamW", {{"lr", "0.02"}}},
                .wrapper = {"distributed_optimizer"},
                .story = {{"thaw", {{"part", "2"}}}, {"step", {{"absent", "0"}}}}});
}

// Each rank skipped one backward, and gradients of different steps were averaged.
TEST(TrainingFuzz, FsdpUnshardedSlippedBackwards) {
  expect_sound({.seed = 5403,
                .world = 2,
                .dtype = "float",
                .layers = {},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"fsdp", {{"strategy", "none"}}},
                .story = {{"step", {{"absent", "0"}}}, {"step", {{"absent", "1"}}}, {"step"}}});
}

// add_param_group() after a freeze ended the process by a signal.
TEST(TrainingFuzz, ZeroFreezeThenAddGroup) {
  expect_sound(
      {.seed = 3823,
       .world = 2,
       .dtype = "float",
       .layers = {{"layer_norm"}, {"instance_norm"}, {"unused", {{"out", "4"}}}},
       .optimizer = {"AdamW", {{"lr", "0.02"}}},
       .wrapper = {"zero", {{"late_part", "3"}}},
       .story = {{"freeze"}, {"add_group"}, {"step"}, {"thaw"}, {"step", {{"state", "1"}}}}});
}

// autograd::grad() through a checkpointed function added to the parameters' gradients.
TEST(TrainingFuzz, CheckpointWithPenalty) {
  expect_sound({.seed = 1198,
                .world = 2,
                .dtype = "float",
                .layers = {{"checkpoint"}},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"ddp_zero"},
                .story = {{"step", {{"micro", "3"}, {"no_sync", "1"}, {"penalty", "1"}}}}});
}

// The rank whose own backward failed after that collective did not see its error either.
TEST(TrainingFuzz, DdpFailsAfterAnUnseenError) {
  expect_sound(
      {.seed = 40756,
       .world = 2,
       .dtype = "float",
       .layers = {{"attention", {{"out", "3"}}}, {"module_list"}, {"shared"}},
       .optimizer = {"Adam", {{"lr", "0.02"}}},
       .wrapper = {"ddp_zero",
                   {{"first_bucket_mb", "0.0001"}, {"no_reduce", "1"}, {"partition", "whole"}}},
       .story = {{"freeze", {{"part", "0"}}},
                 {"step", {{"absent", "0"}}},
                 {"step", {{"no_sync", "1"}}}}});
}

// Events that a deliberate break (breaks.txt) turns into a finding.

// Break "graph_of_older_values".
TEST(TrainingFuzz, FsdpKeptGraphThenEvaluate) {
  expect_sound({.seed = 1,
                .world = 2,
                .dtype = "float",
                .layers = {{"linear"}},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"fsdp", {{"policy", "blocks"}}},
                .story = {{"step", {{"kept_graph", "1"}, {"then_evaluate", "1"}}}}});
}

// Break "norm_of_last_gradient".
TEST(TrainingFuzz, FsdpNormOfFloats) {
  expect_sound({.seed = 1,
                .world = 2,
                .dtype = "float",
                .layers = {{"linear"}},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"fsdp"},
                .story = {{"step", {{"clip", "norm"}}}}});
}

// Break "stale_sum_accepted".
TEST(TrainingFuzz, SumThatIsNotCleared) {
  expect_sound({.seed = 1,
                .world = 2,
                .dtype = "float",
                .layers = {{"linear"}},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"distributed_optimizer", {{"reduce", "sum"}}},
                .story = {{"step"}, {"step", {{"uncleared", "1"}}}}});
}

// Break "in_place_sum_unmarked".
TEST(TrainingFuzz, InPlaceMeanThatIsNotCleared) {
  expect_sound({.seed = 1,
                .world = 2,
                .dtype = "double",
                .layers = {{"linear"}},
                .optimizer = {"torch.SGD", {{"lr", "0.02"}}},
                .wrapper = {"zero", {{"in_place", "1"}}},
                .story = {{"step"}, {"step", {{"uncleared", "1"}}}}});
}

// A unit that was gathered again after the reduction of its gradients stayed gathered over the
// optimizer's step.
TEST(TrainingFuzz, FsdpGathersAfterAPenalty) {
  expect_sound({.seed = 44630,
                .world = 3,
                .dtype = "double",
                .layers = {{"cumulative_norm", {{"frozen", "1"}}}},
                .optimizer = {"torch.SGD", {{"lr", "0.02"}}},
                .wrapper = {"fsdp", {{"hosts", "001"}, {"resident_bytes", "1"}}},
                .story = {{"step", {{"penalty", "1"}}}, {"step"}}});
}

// autograd::grad() of the input ended as a backward pass that reduces.
TEST(TrainingFuzz, FsdpPenaltyLeavesBuffers) {
  expect_sound({
      .seed = 1430,
      .world = 2,
      .dtype = "double",
      .layers = {{"counter"}},
      .optimizer = {"torch.SGD", {{"lr", "0.02"}}},
      .wrapper = {"fsdp"},
      .story = {{"step", {{"kept_graph", "1"}, {"penalty", "1"}}}},
  });
}

TEST(TrainingFuzz, FsdpPenaltyInJoin) {
  expect_sound({
      .seed = 1,
      .world = 3,
      .dtype = "double",
      .layers = {{"linear"}},
      .optimizer = {"SGD", {{"lr", "0.02"}}},
      .wrapper = {"fsdp"},
      .story = {{"join", {{"batches", "312"}, {"penalty", "1"}}}, {"step"}},
  });
}

// Nothing showed that the hooks' sums were of different steps.
TEST(TrainingFuzz, DdpHookSkippedBackwards) {
  expect_sound({
      .seed = 3731,
      .world = 2,
      .dtype = "double",
      .layers = {},
      .optimizer = {"RMSprop", {{"lr", "0.02"}}},
      .wrapper = {"ddp", {{"hook", "bf16"}}},
      .story = {{"step", {{"absent", "1"}}}, {"step", {{"absent", "0"}}}},
  });
}

// With mixed precision, the end of summon_full_params() ended by a signal if a parameter was
// frozen.
TEST(TrainingFuzz, FsdpSummonsFrozenParametersOfAnotherDtype) {
  expect_sound({
      .seed = 3506,
      .world = 1,
      .dtype = "float",
      .layers = {},
      .optimizer = {"SGD", {{"lr", "0.02"}}},
      .wrapper = {"fsdp", {{"mixed", "sums_in_bfloat16"}}},
      .story = {{"freeze"}, {"write"}, {"thaw"}, {"step"}, {"step"}},
  });
}

// State dicts lacked ignored parameters.
TEST(TrainingFuzz, FsdpIgnoredParameters) {
  expect_sound({
      .seed = 366,
      .world = 2,
      .dtype = "float",
      .layers = {{"linear"}},
      .optimizer = {"Adam", {{"lr", "0.02"}}},
      .wrapper = {"fsdp", {{"ignored", "0"}}},
      .story = {{"step"}, {"join", {{"batches", "21"}}}, {"step"}},
  });
}

// The last bits of the outer optimizer's step depended on the division of the parameters over
// ranks.
TEST(TrainingFuzz, GroupsThatTrainApart) {
  for (const char* kind : {"ddp", "zero", "distributed_optimizer", "fsdp"}) {
    for (const char* background : {"0", "1"}) {
      expect_sound({
          .seed = 227,
          .world = 4,
          .dtype = "float",
          .layers = {{"linear"}},
          .optimizer = {"AdamW", {{"lr", "0.02"}}},
          .wrapper = {kind, {{"every", "2"}, {"local_sgd", "2"}, {"outer_background", background}}},
          .story = {{"step"}, {"step"}, {"step"}, {"step"}, {"step"}},
      });
    }
  }
}

// A rank that owned nothing of a bucket of another dtype than float32 threw in step().
TEST(TrainingFuzz, ZeroOwnsNothingOfAHalfBucketOnHosts) {
  expect_sound({
      .seed = 102756,
      .world = 3,
      .dtype = "float",
      .layers = {{"half_layer"}},
      .optimizer = {"SGD", {{"lr", "0.02"}}},
      .wrapper = {"zero", {{"hosts", "001"}, {"partition", "first_fit"}}},
      .story = {{"step"}},
  });
}

// Ranks gathered buckets in different orders, because one of them could not update its bucket in
// one pass.
TEST(TrainingFuzz, ZeroOwnsAChannelsLastParameterOnHosts) {
  expect_sound({
      .seed = 7,
      .world = 3,
      .dtype = "float",
      .layers = {{"double_layer"}, {"conv2d", {{"channels_last", "1"}}}},
      .optimizer = {"SGD", {{"lr", "0.02"}}},
      .wrapper = {"zero", {{"hosts", "001"}, {"partition", "whole"}, {"bucket_cap_mb", "0.0002"}}},
      .story = {{"step"}, {"step"}},
  });
}

// A checkpoint had no state of SGD without momentum, but what rounding took from the parameters.
// That was taken for state.
TEST(TrainingFuzz, ZeroResumesRoundedParametersWithoutOptimizerState) {
  expect_sound({
      .seed = 6002,
      .world = 2,
      .dtype = "float",
      .layers = {{"linear"}},
      .optimizer = {"SGD", {{"lr", "0.02"}}},
      .wrapper = {"zero", {{"hosts", "01"}, {"wire_parameters", "bfloat16"}}},
      .story = {{"step"}, {"move", {{"folder", "1"}}}, {"step"}},
  });
}

// Gathers in the background used the group of rounded gradients, which rounded the parameters.
TEST(TrainingFuzz, ZeroGathersExactParametersBesideRoundedGradients) {
  expect_sound({
      .seed = 10586,
      .world = 2,
      .dtype = "float",
      .layers = {{"linear"}},
      .optimizer = {"SGD", {{"lr", "0.0001"}}},
      .wrapper = {"zero", {{"hosts", "01"}, {"overlap", "background"}, {"wire_gradients", "int8"}}},
      .story = {{"step"}},
  });
}

// A rank gathered a unit that the others did not use, in a group in which they called nothing any
// more, and they reduced gradients in another one.
TEST(TrainingFuzz, FsdpOtherUnitsWithRoundedParameters) {
  expect_sound(
      {.seed = 535,
       .world = 3,
       .dtype = "float",
       .layers = {{"embedding_bag", {{"out", "5"}}},
                  {"counter"},
                  {"cell", {{"out", "5"}}},
                  {"conditional", {{"out", "3"}}}},
       .optimizer = {"Adam", {{"amsgrad", "1"}, {"lr", "0.02"}}},
       .wrapper = {"fsdp",
                   {{"hosts", "012"}, {"policy", "leaves"}, {"wire_parameters", "bfloat16"}}},
       .story = {{"step", {{"branch", "own"}}},
                 {"step", {{"branch", "rank0"}, {"when", "after"}}}}});
}

// GradScaler took complex gradients for real ones.
TEST(TrainingFuzz, ScaledComplexGradients) {
  expect_sound({.seed = 2309,
                .world = 2,
                .dtype = "float",
                .layers = {{"complex"}},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"zero"},
                .story = {{"step", {{"scaler", "1"}}}}});
}

// The norm of a step left out imaginary parts.
TEST(TrainingFuzz, NormOfAStepWithComplexGradients) {
  expect_sound({.seed = 2389,
                .world = 2,
                .dtype = "float",
                .layers = {{"complex"}},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"zero", {{"track_norm", "1"}}},
                .story = {{"step"}}});
}

// What the wire had rounded away of a parameter that was frozen while the checkpoint was loaded was
// an error when it was thawed. "resume" compares with a run without it: the bits are equal.
TEST(TrainingFuzz, RoundedAwayOfAThawedParameter) {
  expect_sound({.seed = 292,
                .world = 2,
                .dtype = "float",
                .layers = {{"linear", {{"frozen", "1"}}}},
                .optimizer = {"Adam", {{"lr", "0.02"}}},
                .wrapper = {"zero", {{"hosts", "01"}, {"wire_parameters", "int8"}}},
                .story = {{"thaw", {{"part", "0"}}},
                          {"step"},
                          {"resume", {{"state", "1"}}},
                          {"step", {{"state", "1"}}}}});
}

// Before step(), a thawed parameter had each rank's own gradient, so each rank clipped by a norm of
// its own.
TEST(TrainingFuzz, DistributedOptimizerClipsThawedGradients) {
  expect_sound({.seed = 1382,
                .world = 2,
                .dtype = "float",
                .layers = {{"linear", {{"frozen", "1"}}}},
                .optimizer = {"SGD", {{"lr", "0.02"}}},
                .wrapper = {"distributed_optimizer", {{"own_backward", "1"}}},
                .story = {{"thaw", {{"part", "0"}}}, {"step", {{"clip", "norm"}}}}});
}

// Where all else was frozen, unscaling the gradients of shards() left out those of a thawed
// parameter without a word. It is an error.
TEST(TrainingFuzz, UnscaledWithoutTheThawedParameter) {
  expect_sound({.seed = 7623,
                .world = 3,
                .dtype = "float",
                .layers = {{"cell", {{"frozen", "1"}}}},
                .optimizer = {"Adam", {{"amsgrad", "1"}, {"lr", "0.02"}}},
                .wrapper = {"zero", {{"shard_gradients", "1"}}},
                .story = {{"step"},
                          {"freeze", {{"part", "1"}}},
                          {"thaw", {{"part", "0"}}},
                          {"step", {{"scaler", "1"}, {"state", "1"}, {"when", "after"}}}}});
}

}  // namespace
}  // namespace tessera::fuzz
