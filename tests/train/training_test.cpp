#include <cmath>

#include <torch/cuda.h>
#include <torch/nn.h>

#include "tessera/error.h"
#include "tessera/models/gpt2.h"
#include "tessera/safetensors.h"
#include "tessera/train.h"
#include "train/train_fixture.h"

namespace tessera {
namespace {

using testing::expect_near;
using TrainingTest = testing::TrainFixture;

TEST_F(TrainingTest, OneRankWritesAllOutputs) {
  ASSERT_EQ(train({"c.yaml", "train.steps=30", "train.eval_every=10",
                   "train.sample={length: 5, prompt: li}"}),
            0)
      << err_;
  const auto lines = log();
  ASSERT_EQ(lines.size(), 30u);
  for (size_t step = 0; step < lines.size(); ++step) {
    EXPECT_GE(lines[step].size(), 6u);
    EXPECT_EQ(lines[step]["step"], step);
    EXPECT_EQ(lines[step]["lr"], 3e-3);
    EXPECT_GT(lines[step]["grad_norm"].get<double>(), 0);
    EXPECT_GT(lines[step]["ms"].get<double>(), 0);
    EXPECT_GT(lines[step]["tokens_per_s"].get<double>(), 0);
  }
  EXPECT_NEAR(lines[0]["loss"].get<double>(), std::log(256.0), 0.1);
  EXPECT_LT(lines.back()["loss"].get<double>(), 0.75 * lines[0]["loss"].get<double>());
  for (const char* expected :
       {"step  0/29  loss 5.", "evaluation after 10 steps: loss ",
        "evaluation after 30 steps: loss ", "a bigram model of the same split reaches",
        "bytes per rank", "rank 0 ", "unsharded", "sample:\nli",
        "weights written to out/model.safetensors"})
    EXPECT_NE(out_.find(expected), std::string::npos) << expected << " is not in\n" << out_;
  EXPECT_EQ(out_.find('\r'), std::string::npos) << "a progress bar in a pipe";
  EXPECT_EQ(SafetensorsFile("out/model.safetensors").info("transformer.wte.weight").shape,
            (std::vector<int64_t>{256, 16}));
  EXPECT_EQ(GPT2Options::from_config_json("out/config.json").n_layer, 2);
}

TEST_F(TrainingTest, NoStepsIsAllowedAndInitIsRead) {
  ASSERT_EQ(train({"c.yaml", "train.steps=0"}), 0) << err_;
  EXPECT_TRUE(log().empty());
  std::filesystem::copy("out/model.safetensors", "init.safetensors");
  ASSERT_EQ(train({"c.yaml", "train.steps=0", "model.seed=2", "model.init=init.safetensors"}), 0)
      << err_;
  EXPECT_EQ(bytes_of("out/model.safetensors"), bytes_of("init.safetensors"));
}

TEST_F(TrainingTest, ClippingAndScheduleFollowTheConfig) {
  const auto plain = train_ranks(1, {"optimizer={type: SGD, lr: 0.5}"});
  const auto clipped =
      train_ranks(1, {"optimizer={type: SGD, lr: 0.5}", "train.clip_grad_norm=1e-3"});
  EXPECT_EQ(plain.losses[0], clipped.losses[0]);
  EXPECT_EQ(plain.grad_norms[0], clipped.grad_norms[0])
      << "the logged norm is from before clipping";
  EXPECT_NEAR(clipped.losses[5], clipped.losses[0], 0.05);
  EXPECT_LT(plain.losses[5], clipped.losses[5] - 0.1);
  train_ranks(1, {"scheduler={type: warmup_cosine, warmup_steps: 3}"});
  EXPECT_NEAR(log()[0]["lr"].get<double>(), 1e-3, 1e-12);
  EXPECT_NEAR(log()[3]["lr"].get<double>(), 3e-3, 1e-12);
}

TEST_F(TrainingTest, DistributedOptimizerEqualsDataParallelBitByBit) {
  for (const int world : {1, 2, 3, 4}) {
    const auto ddp = train_ranks(world, {"parallel.type=DistributedDataParallel"});
    const std::string ddp_bytes = bytes_of("out/model.safetensors");
    for (const bool pack : {false, true}) {
      const auto ours =
          train_ranks(world, {"parallel.type=DistributedOptimizer", "parallel.reduce_method=mean",
                              "parallel.bcast_period=2",
                              pack ? "parallel.param_pack=true" : "parallel.param_pack=false",
                              "parallel.param_pack_thd=4000"});
      EXPECT_EQ(ours.losses, ddp.losses) << "world " << world << (pack ? ", packed" : "");
      EXPECT_EQ(ours.grad_norms, ddp.grad_norms);
      EXPECT_EQ(bytes_of("out/model.safetensors"), ddp_bytes);
    }
  }
}

TEST_F(TrainingTest, FullyShardedTrainsAsDataParallel) {
  for (const int world : {1, 2, 3, 4}) {
    const auto ddp = train_ranks(world, {"parallel.type=DistributedDataParallel"});
    const SafetensorsFile expected("out/model.safetensors");
    for (const char* policy :
         {"{type: none}", "{type: leaves}", "{type: size_based, min_numel: 1e3}",
          "{type: name_based, patterns: transformer.h.*}"}) {
      const auto ours = train_ranks(
          world,
          {std::string(
               "parallel={type: FullyShardedDataParallel, backward_prefetch: pre, wrap_policy: ") +
               policy + "}",
           "train.sample={length: 3, prompt: li}"});
      expect_near(ours.losses, ddp.losses, 1e-5);
      expect_near(ours.grad_norms, ddp.grad_norms, 1e-4);
      EXPECT_NEAR(*ours.eval_loss, *ddp.eval_loss, 1e-5 * *ddp.eval_loss);
      const SafetensorsFile file("out/model.safetensors");
      ASSERT_EQ(file.names(), expected.names());
      for (const auto& name : file.names())
        EXPECT_TRUE(at::allclose(file.load(name), expected.load(name), 1e-4, 1e-5))
            << name << " " << policy << " world " << world;
    }
  }
}

TEST_F(TrainingTest, ABatchThatRanksDoNotDivideIsJoinedOrDropped) {
  const std::vector<std::string> wrappers{
      "parallel.type=DistributedDataParallel", "parallel.type=ZeroRedundancyOptimizer",
      "parallel={type: ZeroRedundancyOptimizer, shard_gradients: true}",
      "parallel={type: DistributedOptimizer, reduce_method: mean, param_pack: true}",
      "parallel={type: FullyShardedDataParallel, wrap_policy: {type: name_based, patterns: "
      "transformer.h.*}}"};
  for (const auto& wrapper : wrappers) {
    // 7 sequences a step on 2 ranks: 4 at a time, 42 in all: 5 full rounds, then 2 sequences for
    // rank 0 alone.
    const auto joined = train_ranks(2, {wrapper, "train.global_batch=7", "data.uneven=join",
                                        "train.eval_every=3", "scheduler.type=constant"});
    ASSERT_EQ(joined.losses.size(), 6u) << wrapper;
    const auto dropped = train_ranks(2, {wrapper, "train.global_batch=7", "data.uneven=drop"});
    ASSERT_EQ(dropped.losses.size(), 5u) << wrapper;
    // The first five rounds are global batches of 8.
    const auto even = train_ranks(1, {"train.global_batch=8", "train.steps=5"});
    expect_near(dropped.losses, even.losses, 1e-4);
    expect_near({joined.losses.begin(), joined.losses.begin() + 5}, even.losses, 1e-4);
    EXPECT_LT(joined.losses[5], joined.losses[0]);
    EXPECT_GT(joined.losses[5], 0.8 * joined.losses[4]) << "a mean over the one rank that had data";
  }
  const auto one = train_ranks(2, {wrappers[0], "train.global_batch=7", "data.uneven=join"});
  const auto other = train_ranks(2, {wrappers[1], "train.global_batch=7", "data.uneven=join"});
  EXPECT_EQ(one.losses, other.losses) << "the last round too, bit by bit";
  EXPECT_EQ(one.eval_loss, other.eval_loss);
  EXPECT_THROW(train_ranks(2, {wrappers[0], "train.global_batch=7"}), UsageError);
  EXPECT_THROW(
      train_ranks(4, {wrappers[0], "train.global_batch=5", "train.steps=1", "data.uneven=drop"}),
      UsageError);
}

TEST_F(TrainingTest, CompressedGradientsTrain) {
  const auto plain = train_ranks(2, {"parallel.type=DistributedDataParallel", "train.steps=30"});
  for (const char* hook : {"comm_hook: fp16", "comm_hook: bf16",
                           "comm_hook: {type: power_sgd, rank: 4, start_iteration: 3}"}) {
    const auto compressed = train_ranks(
        2,
        {std::string("parallel={type: DistributedDataParallel, ") + hook + "}", "train.steps=30"});
    EXPECT_NE(compressed.losses, plain.losses) << hook;
    EXPECT_NEAR(compressed.losses.back(), plain.losses.back(), 0.1 * plain.losses.back()) << hook;
  }
}

TEST_F(TrainingTest, WrongCommandsExitWithCode2AndAMessage) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{}, "tessera train: no config given"},
      {{"nowhere.yaml"}, "tessera train: nowhere.yaml: No such file or directory"},
      {{"c.yaml", "train.stpes=1"},
       "tessera train: command line: train.stpes: unknown key; did you mean \"steps\"?"},
      {{"c.yaml", "data.path=nowhere.txt"}, "command line: data.path: nowhere.txt: No such file"},
      {{"c.yaml", "model.vocab_size=100"}, "command line: model.vocab_size: "},
      {{"c.yaml", "model.init=c.yaml"}, "command line: model.init: "},
      {{"c.yaml", "train.log=text.txt/log.jsonl"}, "command line: train.log: "},
      {{"c.yaml", "train.save=/proc/nowhere/x"}, "command line: train.save: "},
      {{"c.yaml", "train.save=."}, "command line: train.save: "},
      {{"c.yaml", "data.val_fraction=0.0001"}, "data.seq_len: "},
      {{"c.yaml", "optimizer.lrr=1"},
       "command line: optimizer.lrr: unknown key; did you mean \"lr\"?"},
      {{"c.yaml", "optimizer.lr=-1"}, "command line: optimizer.lr: "},
      {{"c.yaml", "optimizer.type=AdmW"}, "did you mean \"AdamW\"?"},
      {{"c.yaml", "--resum"}, "--resum: unknown option"},
      {{"c.yaml", "--dump-config", "half"}, "--dump-config: \"half\"; expected full or minimal"},
  };
  for (const auto& [arguments, expected] : cases) {
    EXPECT_EQ(train(arguments), 2);
    EXPECT_NE(err_.find(expected), std::string::npos) << expected << " is not in: " << err_;
    EXPECT_EQ(out_, "");
  }
}

TEST_F(TrainingTest, AnOutputReplacesNeitherAnotherNorAnInput) {
  std::ofstream("base.yaml") << kConfig;
  std::ofstream("c.yaml") << "base: base.yaml\n";
  std::filesystem::create_directory("out");
  std::filesystem::create_symlink("../text.txt", "out/link");
  const std::string text = bytes_of("text.txt"), base = bytes_of("base.yaml");
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"train.save=out/../out/log.jsonl"},
       "train.save: out/../out/log.jsonl: train.log writes it, too; expected a file of its own"},
      {{"train.save=out/config.json"},
       "train.save_config: out/config.json: train.save writes it, too"},
      {{"train.log=out/config.json"},
       "train.save_config: out/config.json: train.log writes it, too"},
      {{"train.log=out/link"}, "train.log: out/link: data.path reads it"},
      {{"train.save=text.txt"}, "train.save: text.txt: data.path reads it"},
      {{"train.log=text.txt", "data.path='t*.txt'"}, "train.log: text.txt: data.path reads it"},
      {{"train.save=c.yaml"}, "train.save: c.yaml: the config is read from it"},
      {{"train.log=base.yaml"}, "train.log: base.yaml: the config is read from it"},
      {{"train.save=out/" + std::string(256, 'x')},
       ": File name too long; expected a name of at most 255 bytes"},
      {{"train.log=out/" + std::string(256, 'x')},
       ": File name too long; expected a name of at most 255 bytes"},
  };
  for (const auto& [changes, expected] : cases) {
    std::vector<std::string> words{"c.yaml"};
    words.insert(words.end(), changes.begin(), changes.end());
    EXPECT_EQ(train(words), 2) << expected;
    EXPECT_NE(err_.find(expected), std::string::npos) << expected << " is not in: " << err_;
    EXPECT_EQ(out_, "");
  }
  EXPECT_EQ(bytes_of("text.txt"), text);
  EXPECT_EQ(bytes_of("base.yaml"), base);
  EXPECT_EQ(train({"c.yaml", "train.save=out/" + std::string(255, 'x')}), 0) << err_;
}

TEST_F(TrainingTest, TooManySamplesAreAnErrorBeforeTraining) {
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"train.steps=9223372036854775807"},
       "command line: train.steps: 9223372036854775807 times a train.global_batch of 12; expected "
       "at most 384307168202282325"},
      {{"train.steps=1537228672809129302"}, "command line: train.steps: "},
      {{"train.eval_batches=9223372036854775807"}, "command line: train.eval_batches: "},
      {{"train.global_batch=9223372036854775807"},
       "command line: train.global_batch: 9223372036854775807; expected at most 2147483648"},
      {{"train.accumulation=9223372036854775807"}, "command line: train.accumulation: "},
      {{"train={epochs: 1e300, global_batch: 12}"}, "command line: train.epochs: 1e+300 times "},
  };
  for (const auto& [changes, expected] : cases) {
    EXPECT_EQ(train({"c.yaml", changes[0]}), 2) << expected;
    EXPECT_NE(err_.find(expected), std::string::npos) << expected << " is not in: " << err_;
    EXPECT_EQ(out_, "");
  }
}

TEST_F(TrainingTest, AnErrorInALossNamesTheLossAndTheShapes) {
  EXPECT_EQ(train({"c.yaml", "loss={type: mse}"}), 1);
  EXPECT_NE(err_.find("tessera train: rank 0: command line: loss.type: mse of a prediction of "
                      "shape [12, 16, 256] and targets of shape [12, 16]: expected equal shapes"),
            std::string::npos)
      << err_;
}

TEST_F(TrainingTest, WeightsThatAreNotFiniteEndTheRunWithoutASampleOrAFile) {
  EXPECT_EQ(train({"c.yaml", "optimizer.lr=1e38", "train.steps=1", "train.sample={length: 5}"}), 1);
  EXPECT_NE(err_.find("rank 0, update of step 0: parameter transformer.wte.weight: infinity in"),
            std::string::npos)
      << err_;
  EXPECT_EQ(out_.find("sample:"), std::string::npos) << out_;
  EXPECT_FALSE(std::filesystem::exists("out/model.safetensors"));
}

TEST_F(TrainingTest, CudaWithoutADeviceOrNcclIsAnError) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "a CUDA device is there, and this build uses it";
  EXPECT_EQ(train({"c.yaml", "model.device=cuda"}), 2);
  EXPECT_NE(err_.find("command line: model.device: cuda, and this process sees no CUDA device, or "
                      "Tessera was built without TESSERA_WITH_NCCL"),
            std::string::npos)
      << err_;
}

TEST_F(TrainingTest, AnUnknownDeviceIsAnErrorOfTheConfig) {
  for (const std::string name : {"tpu", "cuda:", "cuda:one", "cpu:0", "sim"}) {
    EXPECT_EQ(train({"c.yaml", "model.device=\"" + name + "\""}), 2);
    EXPECT_NE(err_.find("model.device: \"" + name +
                        "\"; expected one of cpu, cuda, or one but cpu "
                        "with a number, such as cuda:1"),
              std::string::npos)
        << err_;
  }
}

TEST_F(TrainingTest, TokensAboveTheVocabularyAreAnErrorBeforeTraining) {
  std::ofstream("high.txt") << std::string(400, 'a') + "\xf0";
  ASSERT_EQ(train({"c.yaml", "data.path=high.txt", "model.vocab_size=200"}), 2);
  EXPECT_NE(
      err_.find("model.vocab_size: ByteText: high.txt (evaluation part): token 240 at position 40"),
      std::string::npos)
      << err_;
  std::vector<int32_t> header(256, 0);
  header[0] = 20240520, header[1] = 1, header[2] = 100;
  std::vector<uint16_t> tokens(100, 7);
  tokens[60] = 300;
  std::ofstream bin("tokens.bin", std::ios::binary);
  bin.write(reinterpret_cast<const char*>(header.data()), 1024);
  bin.write(reinterpret_cast<const char*>(tokens.data()), 200);
  bin.close();
  ASSERT_EQ(train({"c.yaml", "data={type: TokenBin, path: tokens.bin, seq_len: 16}"}), 2);
  EXPECT_NE(
      err_.find(
          "data.path: TokenBin: tokens.bin: token 300 at position 60 is not below vocab_size, 256"),
      std::string::npos)
      << err_;
  EXPECT_FALSE(std::filesystem::exists("out/log.jsonl"));
}

TEST_F(TrainingTest, AnErrorOnOneRankIsTheSameOnAll) {
  const Config good = load_config("c.yaml", {"parallel.type=ZeroRedundancyOptimizer"});
  const Config bad =
      load_config("c.yaml", {"parallel.type=ZeroRedundancyOptimizer", "data.path=gone.txt"});
  const auto errors = testing::run_ranks_catching(
      3, [&](ProcessGroup group, int rank) { run_training(rank == 1 ? bad : good, group); });
  for (const auto& error : errors) {
    EXPECT_NE(testing::message_of(error).find("rank 1: command line: data.path: gone.txt"),
              std::string::npos)
        << testing::message_of(error);
  }
}

TEST_F(TrainingTest, WorldMustDivideTheBatch) {
  EXPECT_THROW(train_ranks(2, {"train.global_batch=9"}), UsageError);
  EXPECT_THROW(train_ranks(2, {"parallel.type=none"}), UsageError);
}

TEST_F(TrainingTest, EveryWrapperReachesTheSameLosses) {
  const std::vector<std::string> base = {"train.steps=50", "train.global_batch=12"};
  const auto with = [&](const std::string& parallel) {
    auto overrides = base;
    overrides.push_back("parallel=" + parallel);
    return overrides;
  };
  const TrainResult reference = train_ranks(1, base);
  const std::string reference_weights = bytes_of("out/model.safetensors");
  EXPECT_LT(reference.losses.back(), reference.losses.front());
  for (const int world : {1, 2, 3, 4}) {
    const TrainResult ddp = train_ranks(world, with("{type: DistributedDataParallel}"));
    const std::string ddp_weights = bytes_of("out/model.safetensors");
    expect_near(ddp.losses, reference.losses, 1e-5);
    expect_near(ddp.grad_norms, reference.grad_norms, 1e-3);
    for (const char* zero :
         {"{type: ZeroRedundancyOptimizer}", "{type: ZeroRedundancyOptimizer, partition: whole}",
          "{type: ZeroRedundancyOptimizer, partition: first_fit, shard_gradients: true}"}) {
      const TrainResult result = train_ranks(world, with(zero));
      EXPECT_EQ(result.losses, ddp.losses) << zero << " on " << world;
      EXPECT_EQ(result.eval_loss, ddp.eval_loss) << zero << " on " << world;
      EXPECT_TRUE(bytes_of("out/model.safetensors") == ddp_weights) << zero << " on " << world;
    }
    if (world == 1) {
      EXPECT_EQ(ddp.losses, reference.losses);
      EXPECT_TRUE(ddp_weights == reference_weights);
    }
  }
}

TEST_F(TrainingTest, EveryWrapperReachesTheSameLossesWithClipping) {
  const std::vector<std::string> base = {"train.clip_grad_norm=0.5", "train.steps=20"};
  const TrainResult reference = train_ranks(1, base);
  for (const char* type : {"DistributedDataParallel", "ZeroRedundancyOptimizer"}) {
    auto overrides = base;
    overrides.push_back(std::string("parallel.type=") + type);
    expect_near(train_ranks(2, overrides).losses, reference.losses, 1e-5);
  }
}

TEST_F(TrainingTest, EvaluationIsBitIdenticalForAnyWorldSize) {
  const auto one = train_ranks(1, {"train.steps=0"});
  ASSERT_TRUE(one.eval_loss.has_value());
  EXPECT_EQ(train_ranks(1, {"train.steps=0", "model.dropout=0.5"}).eval_loss, one.eval_loss)
      << "no dropout in it";
  EXPECT_EQ(train_ranks(2, {"train.steps=0"}).eval_loss, one.eval_loss);
  EXPECT_EQ(train_ranks(3, {"train.steps=0"}).eval_loss, one.eval_loss);
}

TEST_F(TrainingTest, TheShardsOfTheStateAddUpToTheWhole) {
  train_ranks(2, {"parallel.type=ZeroRedundancyOptimizer"});
  int64_t sharded = 0, whole = 0;
  std::istringstream lines(out_);
  for (std::string line; std::getline(lines, line);) {
    line.erase(std::remove(line.begin(), line.end(), ','), line.end());
    std::istringstream words(line);
    std::string name;
    int64_t number = 0, parameters = 0, gradients = 0, state = 0;
    if (line.rfind("rank ", 0) == 0 && words >> name >> number >> parameters >> gradients >> state)
      sharded += state;
    if (line.rfind("unsharded", 0) == 0 && words >> name >> parameters >> gradients >> state)
      whole = state;
  }
  EXPECT_GT(whole, 0) << out_;
  EXPECT_EQ(sharded, whole) << out_;
}

}  // namespace
}  // namespace tessera
