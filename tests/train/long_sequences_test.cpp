#include <gmock/gmock.h>

#include "models/causal_attention.h"
#include "models/linear_cross_entropy.h"
#include "tessera/safetensors.h"
#include "train/train_fixture.h"

// GPT-2 with sequences that have attention in blocks, and a loss in chunks of logits.

namespace tessera {
namespace {

using testing::expect_near;

class LongSequences : public testing::TrainFixture {
 protected:
  static constexpr int64_t kLength = 300, kVocabulary = 8000, kSequences = 12;

  TrainResult train_long(int world, std::vector<std::string> overrides) {
    overrides.insert(
        overrides.begin(),
        {"model.n_positions=" + std::to_string(kLength), "data.seq_len=" + std::to_string(kLength),
         "model.vocab_size=" + std::to_string(kVocabulary),
         "train.global_batch=" + std::to_string(kSequences), "train.steps=3"});
    return train_ranks(world, overrides);
  }
};

TEST_F(LongSequences, UseBlocksAndChunksOnEveryRank) {
  EXPECT_GT(kLength, kWholeScoresLength);
  const auto chunks = CrossEntropyChunks::of(kVocabulary);
  EXPECT_GT(kLength * kSequences / 3, chunks.tokens) << "a rank of three has one chunk";
}

TEST_F(LongSequences, EveryWrapperTrainsAsOneRank) {
  const auto alone = train_long(1, {});
  EXPECT_LT(alone.losses.back(), alone.losses.front());
  const std::string weights = bytes_of("out/model.safetensors");
  for (const int world : {1, 2, 3}) {
    const auto ddp = train_long(world, {"parallel.type=DistributedDataParallel"});
    const std::string ddp_weights = bytes_of("out/model.safetensors");
    expect_near(ddp.losses, alone.losses, 1e-5);
    if (world == 1) {
      EXPECT_EQ(ddp.losses, alone.losses);
      EXPECT_TRUE(ddp_weights == weights);
    }
    for (const char* same :
         {"{type: ZeroRedundancyOptimizer}", "{type: DistributedOptimizer, reduce_method: mean}",
          "{type: FullyShardedDataParallel, wrap_policy: {type: name_based, patterns: "
          "transformer.h.*}}"}) {
      const auto ours = train_long(world, {"parallel=" + std::string(same)});
      EXPECT_EQ(ours.losses, ddp.losses) << same << " on " << world;
      EXPECT_TRUE(bytes_of("out/model.safetensors") == ddp_weights) << same << " on " << world;
    }
  }
}

TEST_F(LongSequences, CheckpointedBlocksChangeNoBit) {
  const std::string fsdp =
      "parallel={type: FullyShardedDataParallel, wrap_policy: {type: name_based, patterns: "
      "transformer.h.*}}";
  for (const int world : {1, 2, 3}) {
    // The ranks of this test are threads, which draw from the same default generator.
    const std::string dropout = world == 1 ? "model.dropout=0.1" : "model.dropout=0";
    const auto plain = train_long(world, {fsdp, dropout});
    const std::string weights = bytes_of("out/model.safetensors");
    for (const char* every : {"1", "2"}) {
      const auto less =
          train_long(world, {fsdp, dropout, "model.activation_checkpointing=true",
                             std::string("model.activation_checkpointing_every=") + every});
      EXPECT_EQ(less.losses, plain.losses) << every << " on " << world;
      EXPECT_TRUE(bytes_of("out/model.safetensors") == weights) << every << " on " << world;
    }
  }
}

}  // namespace
}  // namespace tessera
