#include "tessera/train/config.h"

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tessera/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

const char* const kModel =
    "model: {type: GPT2, vocab_size: 256, n_positions: 32, n_embd: 16, n_layer: 1, n_head: 2}\n";
const char* const kData = "data: {type: ByteText, path: /usr/share/common-licenses}\n";
const char* const kOptimizer = "optimizer: {type: AdamW, lr: 1e-3, betas: [0.9, 0.95]}\n";
const char* const kTrain = "train: {steps: 3, global_batch: 4}\n";

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/tessera-config-XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    folder_ = name;
    ASSERT_EQ(::chdir(name), 0);
  }
  void TearDown() override {
    ASSERT_EQ(::chdir("/"), 0);
    std::filesystem::remove_all(folder_);
  }

  Config load(const std::string& text, const std::vector<std::string>& overrides = {}) {
    std::ofstream("c.yaml", std::ios::binary) << text;
    return load_config("c.yaml", overrides);
  }
  /// The message of the error; "" when there is none.
  std::string error(const std::string& text, const std::vector<std::string>& overrides = {}) {
    try {
      load(text, overrides);
      return "";
    } catch (const UsageError& e) {
      return e.what();
    }
  }
  std::string base() const { return std::string(kModel) + kData + kOptimizer + kTrain; }
  std::string override_error(const std::string& assignment) { return error(base(), {assignment}); }

  std::filesystem::path folder_;
};

TEST_F(ConfigTest, ReadsTheOptionsOfFullySharded) {
  const Config config =
      load(base(), {"parallel={type: FullyShardedDataParallel, wrap_policy: {type: size_based, "
                    "min_numel: 1e6}, sharding_strategy: shard_grad_op, "
                    "resident_bytes: 1000, backward_prefetch: BACKWARD_POST, mixed_precision: "
                    "{param_dtype: bfloat16, reduce_dtype: float32}}"});
  EXPECT_EQ(config.value("parallel.sharding_strategy"), "shard_grad_op");
  EXPECT_EQ(config.value("parallel.resident_bytes"), "1000");
  EXPECT_EQ(config.value("parallel.backward_prefetch"), "post");
  EXPECT_EQ(config.value("parallel.mixed_precision.param_dtype"), "bfloat16");
  EXPECT_EQ(config.value("parallel.mixed_precision.reduce_dtype"), "float32");
  EXPECT_EQ(config.value("parallel.wrap_policy.min_numel"), "1000000");
  EXPECT_EQ(load(base(), {"parallel.type=FullyShardedDataParallel"})
                .value("parallel.wrap_policy.min_numel"),
            "100000000");
  for (const char* good :
       {"wrap_policy: {type: name_based, patterns: [a, b.*]}", "cpu_offload: true",
        "cpu_offload: {offload_params: true}", "wrap_policy: leaves",
        "backward_prefetch: BACKWARD_PRE", "sharding_strategy: FULL_SHARD", "ignored_modules: a",
        "ignored_modules: a, ignored_parameters: [b.c]"}) {
    EXPECT_EQ(
        override_error(std::string("parallel={type: FullyShardedDataParallel, ") + good + "}"), "")
        << good;
  }
  EXPECT_EQ(load(base(), {"parallel={type: FullyShardedDataParallel, ignored_parameters: [b.c, d], "
                          "ignored_modules: a, cpu_offload: {offload_params: true}}"})
                .value("parallel.ignored_states"),
            load(base(), {"parallel={type: FullyShardedDataParallel, ignored_states: [a, b.c, d]}"})
                .value("parallel.ignored_states"));
  const std::string start = "parallel={type: FullyShardedDataParallel, ";
  const auto says = [&](const std::string& assignment, const std::string& text) {
    EXPECT_NE(override_error(assignment).find(text), std::string::npos)
        << override_error(assignment);
  };
  says(start + "wrap_policy: {type: size_base}}", "did you mean \"size_based\"");
  says(start + "wrap_policy: {type: size_based, min_numel: 0}}",
       "min_numel: 0; expected a whole number >= 1");
  says(start + "wrap_policy: {type: size_based, min_num: 3}}", "min_numel");
  says(start + "wrap_policy: {type: leaves, min_numel: 3}}",
       "parallel.wrap_policy.min_numel: an option of size_based, and parallel.wrap_policy.type is "
       "leaves");
  says(start + "wrap_policy: name_based}", "parallel.wrap_policy.patterns: missing");
  says(start + "wrap_policy: {type: name_based, patterns: ['']}}", "a pattern is empty");
  says(start + "backward_prefetch: 3}", "backward_prefetch");
  says(start + "backward_prefetch: before}", "pre");
  says(start + "mixed_precision: {param_dtype: int8}}", "bfloat16");
  says(start + "cpu_offload: 3}", "cpu_offload: 3; expected true or false");
  says(start + "cpu_offload: [1]}", "expected true or false");
  says(start + "cpu_offload: {offload: true}}", "expected true or false");
  says(start + "wrap_policy: 3}", "size_based");
  says(start + "reshard_after_forward: false}", "expected sharding_strategy: shard_grad_op");
  says(start + "forward_prefetch: true}", "expected overlap: none for false");
  says(start + "parameters_as_bucket_view: true}", "an option of ZeroRedundancyOptimizer");
  says(start + "partition: halves}", "expected one of flat, whole, first_fit");
  says("parallel={type: DistributedDataParallel, wrap_policy: {type: leaves}}",
       "an option of FullyShardedDataParallel");
}

TEST_F(ConfigTest, NamesOfPyTorchAndMmengineAreErrorsWithTheOwnName) {
  const auto says = [&](const std::string& assignment, const std::string& text) {
    EXPECT_NE(override_error(assignment).find(text), std::string::npos)
        << assignment << ": " << override_error(assignment);
  };
  says("optimizer={type: ZeroRedundancyOptimizer, lr: 1}",
       "optimizer.type: ZeroRedundancyOptimizer wraps an optimizer; expected parallel.type: Zero");
  says("optim_wrapper={type: AmpOptimWrapper}",
       "optim_wrapper: no key here; expected optimizer; its accumulative_counts is train.acc");
  says("optimizer.type=AmpOptimWrapper", "with train.autocast and train.loss_scale");
  says("param_scheduler={type: CosineAnnealingLR}", "param_scheduler: no key here; expected sched");
  says("scheduler.type=CosineAnnealingLR", "a name of PyTorch or mmengine; expected cosine");
  says("scheduler={type: chained, schedules: [{type: LinearLR}]}",
       "scheduler.schedules.0.type: LinearLR is a name of PyTorch or mmengine; expected linear");
  says("val_evaluator={type: Accuracy}", "val_evaluator: no key here; expected metrics");
  says("checkpoint.save_best=acc", "checkpoint.save_best: no key here; expected keep_best: {met");
  says("load_from=a.pth", "load_from: no key here; expected model.init for weights");
  says("parallel.type=MMFullyShardedDataParallel", "expected FullyShardedDataParallel");
  says("hooks=[{type: EMAHook}]", "hooks.0.type: EMAHook is a name of PyTorch or mmengine");
  const std::string fsdp = "parallel={type: FullyShardedDataParallel, ";
  says(fsdp + "fsdp_auto_wrap_policy: none}", "fsdp_auto_wrap_policy: no option; expected wrap_p");
  says(fsdp + "wrap_policy: size_based_auto_wrap_policy}", "expected size_based");
  says(fsdp + "use_orig_params: true}", "use_orig_params: no option; parameters always keep");
  says("use_orig_params=true", "expected nothing: parameters always keep");
  says("fsdp_auto_wrap_policy=size", "fsdp_auto_wrap_policy: no key here; expected parallel.wrap");
  says("save_best=acc", "save_best: no key here; expected checkpoint.keep_best: {metric");
  says("checkpoint.keep_best={metric: loss, rule: less}",
       "keep_best.rule: no key here; expected mo");
  says("train.ema={momentum: 0.1}", "expected decay, which is 1 - momentum");
  says("train.batch_size=8", "train.batch_size: no key here; expected train.global_batch");
  says("optimizer.paramwise_cfg={}", "expected optimizer.paramwise");
  says("optimizer.type=torch.optim.AdamW", "a name of PyTorch or mmengine; expected AdamW");
  says("loss=nn.MSELoss", "nn.MSELoss is a name of PyTorch or mmengine; expected mse");
  says("parallel.type=fully_shard", "expected FullyShardedDataParallel");
  says(fsdp + "wrap_policy: {min_num_params: 9, type: size_based}}", "size_based, min_numel: ");
  says("parallel={type: DistributedDataParallel, comm_hook: powerSGD_hook}", "expected power_sgd");
  EXPECT_EQ(load(base(), {fsdp + "sharding_strategy: ShardingStrategy.SHARD_GRAD_OP}"})
                .value("parallel.sharding_strategy"),
            "shard_grad_op");
}

TEST_F(ConfigTest, ReadsDistributedOptimizerUnevenDataAndHooks) {
  const Config config =
      load(base(), {"parallel={type: DistributedOptimizer, reduce_method: Mean, param_pack: true, "
                    "param_pack_thd: 10485760, bcast_period: 500}",
                    "data.uneven=join"});
  EXPECT_EQ(config.value("parallel.reduce_method"), "mean");
  EXPECT_EQ(config.value("parallel.param_pack"), "true");
  EXPECT_EQ(config.value("parallel.param_pack_thd"), "10485760");
  EXPECT_EQ(config.value("parallel.bcast_period"), "500");
  EXPECT_EQ(config.data.uneven, "join");
  const auto says = [&](const std::string& assignment, const std::string& text) {
    EXPECT_NE(override_error(assignment).find(text), std::string::npos)
        << override_error(assignment);
  };
  const std::string ddp = "parallel={type: DistributedDataParallel, ";
  says(ddp + "broadcast_buffers: false}", "expected buffers: none");
  says(ddp + "gradient_as_bucket_view: true}", "gradients always are views of the buckets");
  says("parallel={type: DistributedOptimizer}", "sum or mean");
  says("parallel={type: DistributedOptimizer, reduce_method: max}", "expected one of sum, mean");
  says("parallel={type: DistributedOptimizer, reduce_method: sum, bcast_period: -2}",
       "bcast_period");
  says("parallel={type: DistributedOptimizer, reduce_method: sum, bucket_cap_mb: 3}",
       "param_pack_thd");
  says("parallel={type: ZeroRedundancyOptimizer, param_pack: true}",
       "an option of DistributedOptimizer");
  says("parallel={type: ZeroRedundancyOptimizer, comm_hook: fp16}",
       "an option of DistributedDataParallel");
  says("parallel={type: DistributedDataParallel, comm_hook: fp8}", "power_sgd");
  says("data.uneven=maybe", "join");
  EXPECT_EQ(override_error("parallel={type: DistributedDataParallel, comm_hook: {type: power_sgd, "
                           "rank: 4, start_iteration: 0}}"),
            "");
  EXPECT_EQ(override_error("parallel={type: DistributedDataParallel, comm_hook: {type: power_sgd, "
                           "warm_start: false, error_feedback: false, seed: 3}}"),
            "");
  says("parallel={type: DistributedDataParallel, comm_hook: {type: power_sgd, seed: -3}}",
       "-3; expected a whole number >= 0");
  says("parallel={type: DistributedDataParallel, comm_hook: {type: power_sgd, rank: 0}}",
       "0; expected a whole number >= 1");
  says("parallel={type: DistributedDataParallel, comm_hook: {type: power_sgd, rnak: 4}}",
       "did you mean \"rank\"?");
}

TEST_F(ConfigTest, ReadsEverySection) {
  const Config config = load(
      "model:\n  {type: GPT2, vocab_size: 256, n_positions: 1e2, n_embd: 16, n_layer: 1, n_head: "
      "2, seed: 7, dropout: "
      "0.1}\n"
      "data: {type: ByteText, path: [a.txt, b], seq_len: 64, order: sequential, val_fraction: 0.2, "
      "seed: 3}\n"
      "optimizer: {type: AdamW, lr: 3e-4, betas: [0.9, 0.95], weight_decay: 0}\n"
      "scheduler: {type: warmup_cosine, warmup_steps: 10, min_lr: 1e-5}\n"
      "parallel: {type: ZeroRedundancyOptimizer, partition: first_fit, parameters_as_bucket_view: "
      "false, backend: "
      "gloo, timeout: 1.5, deterministic: true}\n"
      "train: {steps: 100, global_batch: 6, log: l.jsonl, save: null, clip_grad_norm: 1.0, "
      "eval_every: 5,\n"
      "  sample: {length: 9, prompt: Hi, temperature: 0}}\n");
  EXPECT_EQ(config.model.plan.max_length, 100);
  EXPECT_EQ(config.model.seed, 7u);
  EXPECT_EQ(config.value("model.dropout"), "0.1");
  EXPECT_EQ(config.data.plan.files, (std::vector<std::pair<std::string, std::string>>{
                                        {"data.path", "a.txt"}, {"data.path", "b"}}));
  EXPECT_EQ(config.data.order, SampleOrder::sequential);
  EXPECT_EQ(config.value("data.seq_len"), "64");
  EXPECT_EQ(config.train.global_batch, 6);
  EXPECT_EQ(config.value("data.val_fraction"), "0.2");
  EXPECT_EQ(config.optimizer.type, "AdamW");
  EXPECT_EQ(config.optimizer.options.size(), 3u);
  EXPECT_EQ(config.value("scheduler.min_lr"), "1e-05");
  EXPECT_EQ(config.value("parallel.partition"), "first_fit");
  EXPECT_EQ(config.value("parallel.parameters_as_bucket_view"), "false");
  EXPECT_EQ(config.parallel.group.backend, Backend::Gloo);
  EXPECT_EQ(config.parallel.group.timeout.count(), 1500);
  EXPECT_TRUE(config.parallel.group.deterministic);
  EXPECT_TRUE(config.parallel.group.tune_process);
  EXPECT_EQ(config.train.log, "l.jsonl");
  EXPECT_EQ(config.train.save, "");
  EXPECT_EQ(config.train.clip_grad_norm, 1.0);
  EXPECT_EQ(config.train.sample.prompt, (std::vector<int64_t>{'H', 'i'}));
  EXPECT_EQ(config.at("train.sample.length"), "c.yaml:8: train.sample.length: ");
}

TEST_F(ConfigTest, DefaultsAreThoseOfTheDocumentation) {
  const Config config = load(base());
  EXPECT_EQ(config.value("data.seq_len"), "32");
  EXPECT_EQ(config.value("model.dropout"), "~");
  EXPECT_EQ(config.value("model.layer_norm_epsilon"), "1e-05");
  EXPECT_EQ(config.parallel.type, "none");
  EXPECT_FALSE(config.train.clip_grad_norm.has_value());
  EXPECT_EQ(config.scheduler({0, 3, 0, 1}, 0.5), 0.5);
  EXPECT_EQ(config.scheduler({99, 3, 0, 1}, 0.5), 0.5);
}

TEST_F(ConfigTest, ErrorsNameFileLineKeyAndNearest) {
  EXPECT_EQ(
      error(std::string(kModel) + kData + kOptimizer + "train:\n  stpes: 3\n  global_batch: 4\n"),
      "c.yaml:5: train.stpes: unknown key; did you mean \"steps\"?");
  EXPECT_EQ(error(base() + "paralel: {type: none}\n"),
            "c.yaml:5: paralel: unknown key; did you mean \"parallel\"?");
  EXPECT_EQ(error(base() + "zzzzzzzz: 1\n"),
            "c.yaml:5: zzzzzzzz: unknown key; known: model, models, data, optimizer, scheduler, "
            "parallel, train, checkpoint, train_step, data_preprocessor, metrics, hooks");
}

TEST_F(ConfigTest, AnOptionOfAnotherOptimizerNamesIt) {
  EXPECT_NE(override_error("optimizer.momentum=0.9")
                .find("optimizer.momentum: an option of RMSprop and SGD and torch.SGD, and "
                      "optimizer.type is"),
            std::string::npos)
      << override_error("optimizer.momentum=0.9");
}

TEST_F(ConfigTest, EveryKindOfMistakeIsAnError) {
  const std::pair<std::string, std::string> cases[] = {
      {"train.steps=ten", "command line: train.steps: ten; expected a whole number >= 0"},
      {"train.steps=\"10\"",
       "command line: train.steps: the string \"10\"; expected a whole number >= 0"},
      {"train.steps=1.5", "command line: train.steps: 1.5; expected a whole number >= 0"},
      {"train.steps=-1", "command line: train.steps: -1; expected a whole number >= 0"},
      {"train.steps=", "command line: train.steps: nothing; expected a whole number >= 0"},
      {"train.steps=[1]", "command line: train.steps: a list of 1; expected a whole number >= 0"},
      {"train.steps=99999999999999999999", "99999999999999999999; expected a whole number"},
      {"train.steps.x=1", "command line: train.steps.x: train.steps is 3 and has no keys"},
      {"train=5", "command line: train: 5; expected a map of keys"},
      {"train.global_batch=0", "0; expected a whole number >= 1"},
      {"train.clip_grad_norm=0", "0; expected a number > 0"},
      {"train.clip_grad_norm=.nan", ".nan; expected a number > 0"},
      {"train.save_config=true", "train.save names no file"},
      {"train.save_config=yes", "yes; expected true or false"},
      {"train.log=[a, b]", "train.log: a list of 2; expected one path"},
      {"train.sample.promt=x", "train.sample.promt: unknown key; did you mean \"prompt\"?"},
      {"train.sample.prompt=[300]", "token 300; expected tokens below model.vocab_size (256)"},
      {"train.sample.temperature=-1", "-1; expected a number >= 0"},
      {"model.type=GPT3",
       "model.type: GPT3; expected one of GPT2, ImageClassifier, MLP; did you mean \"GPT2\"?"},
      {"model.n_head=3", "model.n_head: 3 does not divide n_embd (16)"},
      {"model.dropout=1", "model.dropout: 1; expected a number >= 0 and < 1"},
      {"model.seed=-1", "-1; expected a whole number >= 0"},
      {"model.config=nowhere.json", "model.config: "},
      {"data.seq_len=33", "command line: data.seq_len: 33 is longer than model.n_positions (32)"},
      {"data.order=shufled",
       "data.order: shufled; expected one of shuffled, sequential; did you mean \"shuffled\"?"},
      {"data.path=null", "data.path: missing; expected the training text or tokens"},
      {"model.type=null", "model.type: missing; expected the name of a model"},
      {"data.type=null", "data.type: missing; expected the name of a dataset"},
      {"data.path=[{a: b}]", "a map; expected a path"},
      {"data.val_fraction=1", "expected a number >= 0 and < 1"},
      {"data.type=TokenBin", ""},
      {"scheduler.type=cosin",
       "expected one of chained, constant, cosine, exponential, linear, multi_step, none, "
       "polynomial, step, "
       "warmup_cosine; did you mean \"cosine\"?"},
      {"scheduler.warmup_steps=5", "an option of constant and warmup_cosine"},
      {"parallel.type=ZeroRedundancyOptimiser", "did you mean \"ZeroRedundancyOptimizer\"?"},
      {"parallel.partition=flat",
       "an option of FullyShardedDataParallel and ZeroRedundancyOptimizer, and parallel.type is "
       "none"},
      {"parallel.timeout=0", "parallel.timeout: 0; expected a number >= 0.001"},
      {"parallel.backend=mpl", "did you mean \"mpi\"?"},
      {"optimizer.lr={a: 1}", "optimizer.lr: a map; expected a number"},
      {"steps", "command line: \"steps\": expected key=value"},
      {"=1", "expected key=value"},
      {"train..steps=1", "expected names joined by dots"},
      {"train.steps=[1", "command line: a list or a map as a key"},
      {"train.steps=!!int 3", "tags are not used"},
  };
  for (const auto& [assignment, expected] : cases) {
    const std::string message = override_error(assignment);
    EXPECT_NE(message.find(expected), std::string::npos) << assignment << " gave: " << message;
    EXPECT_EQ(message.empty(), expected.empty()) << assignment << " gave: " << message;
  }
}

TEST_F(ConfigTest, MissingKeysAndFilesAreErrors) {
  EXPECT_EQ(error(std::string(kModel) + kData + kOptimizer),
            "c.yaml: train: missing; expected a map: steps, global_batch and outputs");
  EXPECT_EQ(error(std::string(kModel) + kData + kOptimizer + "train: {steps: 1}\n"),
            "c.yaml:4: train.global_batch: missing; expected the number of sequences a step, over "
            "all ranks");
  EXPECT_EQ(error(""), "c.yaml: nothing; expected a map with keys and values");
  EXPECT_THROW(load_config("nowhere.yaml"), UsageError);
  EXPECT_THROW(load_config("/"), UsageError);
  const Config config = load(base(), {"data.path=nowhere.txt"});
  try {
    check_config_files(config);
    FAIL() << "a missing file was accepted";
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(),
                 "command line: data.path: nowhere.txt: No such file or directory; expected a "
                 "readable file");
  }
}

TEST_F(ConfigTest, MalformedYamlIsAnError) {
  EXPECT_EQ(error(base() + "model: {}\n"), "c.yaml:5: duplicate key \"model\" (first at c.yaml:1)");
  EXPECT_NE(error("a: [1\nb: 2\n").find("c.yaml:2: not YAML: "), std::string::npos);
  EXPECT_NE(error("a: 1\n---\nb: 2\n").find("more than one YAML document"), std::string::npos);
  EXPECT_NE(error("? [a]\n: 1\n").find("a list or a map as a key"), std::string::npos);
  EXPECT_NE(error("a: &x [*x]\n").find("alias inside the value that it names"), std::string::npos);
  EXPECT_NE(error("a: *x\n").find("not YAML"), std::string::npos);
  EXPECT_NE(error(std::string("a: \0b\n", 6)).find("zero byte"), std::string::npos);
  EXPECT_NE(error("- 1\n- 2\n").find("a list of 2; expected a map"), std::string::npos);
}

TEST_F(ConfigTest, ControlCharactersAreEscapesInMessages) {
  const std::string rest = std::string(kModel) + kData + kTrain;
  EXPECT_EQ(error(rest + "optimizer: {type: \"Ad\\x1b[31mam\\x7f\\x85\", lr: 1e-3}\n")
                .find_first_of("\x1b\x7f\x85"),
            std::string::npos);
  EXPECT_THAT(error(rest + "optimizer: {type: \"Ad\\x1b[31mam\\x7f\\x85\", lr: 1e-3}\n"),
              HasSubstr(R"(Ad\x1b[31mam\x7f\x85)"));
  EXPECT_THAT(error(rest + "optimizer: {type: \"Adam\\0W\", lr: 1e-3}\n"),
              HasSubstr(R"(c.yaml:4: a zero byte in "Adam\x00W"; expected text)"));
  EXPECT_THAT(error(rest + kOptimizer, {"train.save=\"a\\0b\""}),
              HasSubstr(R"(a zero byte in "a\x00b")"));
  EXPECT_THAT(error(rest + kOptimizer, {"train.\x1b[2J=1"}), HasSubstr(R"(\x1b[2J)"));
}

TEST_F(ConfigTest, AnOptionThatIsNoMoreNamesThoseThatReplaceIt) {
  EXPECT_THAT(error(base(), {"parallel={type: ZeroRedundancyOptimizer, overlap_with_ddp: true}"}),
              HasSubstr("expected overlap: none, backward or background"));
}

TEST_F(ConfigTest, OverridesReplaceInOrder) {
  const Config config =
      load(base(), {"optimizer.betas=[0.8, 0.9]", "train.steps=5", "train.steps=1e1",
                    "parallel.type=DistributedDataParallel", "data={type: ByteText, path: other}"});
  EXPECT_EQ(config.train.steps, 10);
  EXPECT_EQ(config.parallel.type, "DistributedDataParallel");
  EXPECT_EQ(config.data.plan.files.front().second, "other");
  EXPECT_EQ(config.at("train.steps"), "command line: train.steps: ");
}

TEST_F(ConfigTest, AliasesAreExpanded) {
  const Config config =
      load(std::string("model: {type: GPT2, n_positions: &n 48, n_embd: 16, n_head: 2}\n") +
           "data: {type: ByteText, path: x, seq_len: *n}\n" + kOptimizer + kTrain);
  EXPECT_EQ(config.value("data.seq_len"), "48");
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr double kAtOnce = 60;  // seconds; instrumented code takes ten times as long
#else
constexpr double kAtOnce = 5;
#endif

/// Each must be an error at once; the bound is loose, a hang or a crash is what it catches.
TEST_F(ConfigTest, HostileFilesAreRefusedAtOnce) {
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 12; ++i) {
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [";
    for (int k = 0; k < 10; ++k) bomb += (k ? ", *a" : "*a") + std::to_string(i - 1);
    bomb += "]\n";
  }
  const auto repeat = [](const std::string& text, size_t bytes) {
    std::string out;
    while (out.size() < bytes) out += text;
    return out;
  };
  std::vector<std::pair<std::string, std::string>> files = {
      {"alias bomb", bomb},
      {"brackets", std::string(400000, '[')},
      {"closed brackets", std::string(200000, '[') + std::string(200000, ']')},
      {"braces", std::string(400000, '{')},
      {"maps", repeat("{a: ", 400000)},
      {"dashes", repeat("- ", 400000)},
      {"question marks", repeat("? ", 400000)},
      {"colons", repeat("a: ", 400000)},
      {"anchors", repeat("&a ", 400000)},
      {"bangs", repeat("! ", 400000)},
      {"quotes", repeat("\"", 400001)},
      {"many keys",
       [] {
         std::string text;
         for (int i = 0; i < 40000; ++i) text += "k" + std::to_string(i) + ": 1\n";
         return text;
       }()},
      {"deep blocks",
       [] {
         std::string text;
         for (int i = 0; i < 800; ++i) text += std::string(i, ' ') + "a:\n";
         return text;
       }()},
      {"commas", repeat("[,", 400000)},
      {"long key", std::string(400000, 'k') + ": 1\n"},
  };
  for (const auto& [name, text] : files) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_NE(error(text), "") << name;
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    EXPECT_LT(seconds, kAtOnce) << name;
    RecordProperty(name, std::to_string(seconds));
  }
  std::ofstream("big.yaml").close();
  std::filesystem::resize_file("big.yaml", 100 << 20);
  try {
    load_config("big.yaml");
    FAIL() << "100 MiB were accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("104857600 bytes; a config has at most 1048576"),
              std::string::npos);
  }
}

TEST_F(ConfigTest, TheWorldSizeMustFitTheConfig) {
  Config config = load(base(), {"train.global_batch=9"});
  EXPECT_NO_THROW(check_config_world(config, 1));
  EXPECT_THROW(check_config_world(config, 3), UsageError);
  config = load(base(), {"train.global_batch=9", "parallel.type=ZeroRedundancyOptimizer"});
  EXPECT_NO_THROW(check_config_world(config, 3));
  try {
    check_config_world(config, 2);
    FAIL() << "9 sequences on 2 ranks were accepted";
  } catch (const UsageError& e) {
    EXPECT_STREQ(e.what(),
                 "command line: train.global_batch: 9 sequences cannot be divided by 2 ranks; "
                 "expected a multiple of 2");
  }
}

TEST_F(ConfigTest, BasesAreMergedLaterWins) {
  std::filesystem::create_directory("common");
  std::ofstream("common/model.yaml") << kModel;
  std::ofstream("common/base.yaml")
      << "base: model.yaml\n"
      << kData << kOptimizer
      << "train: {steps: 3, global_batch: 4, log: a.jsonl}\n"
         "parallel: {type: ZeroRedundancyOptimizer, partition: whole}\n";
  std::ofstream("other.yaml") << "train: {steps: 7}\n";
  const Config config =
      load("base: [common/base.yaml, other.yaml]\nmodel: {n_layer: 2}\ntrain:\n  log: null\n");
  EXPECT_EQ(config.value("model.n_layer"), "2");
  EXPECT_EQ(config.value("model.n_embd"), "16");
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.train.log, "");
  EXPECT_EQ(config.value("parallel.partition"), "whole");
  EXPECT_EQ(config.at("model.n_embd"), "common/model.yaml:1: model.n_embd: ");
  EXPECT_EQ(config.at("train.log"), "c.yaml:4: train.log: ");

  EXPECT_NE(error("base: common/base.yaml\nparallel: {type: DistributedDataParallel}\n")
                .find("parallel.partition: an option of FullyShardedDataParallel and "
                      "ZeroRedundancyOptimizer"),
            std::string::npos);
  const Config dropped =
      load("base: common/base.yaml\nparallel: {delete: true, type: DistributedDataParallel}\n");
  EXPECT_EQ(dropped.parallel.type, "DistributedDataParallel");
  EXPECT_EQ(error("base: common/base.yaml\nmodel: {delete: 3}\n"),
            "c.yaml:2: delete: 3; expected true (removes the bases' values of this map) or false");

  std::ofstream("round.yaml") << "base: c.yaml\n";
  EXPECT_NE(error("base: round.yaml\n")
                .find("round.yaml:1: base: c.yaml; the files include each other as base"),
            std::string::npos);
  EXPECT_NE(error("base: nowhere.yaml\n").find("c.yaml:1: base: nowhere.yaml: No such file"),
            std::string::npos);
  EXPECT_NE(error("base: {a: b}\n").find("a map; expected a YAML file or a list of them"),
            std::string::npos);
}

TEST_F(ConfigTest, ManyBasesAreRefusedAtOnce) {
  for (int i = 0; i < 12; ++i) {
    std::ofstream file("b" + std::to_string(i) + ".yaml");
    file << "base: ["
         << (i == 0 ? ""
                    : "b" + std::to_string(i - 1) + ".yaml, b" + std::to_string(i - 1) + ".yaml")
         << "]\n";
  }
  EXPECT_NE(error("base: b11.yaml\n").find("more than 64 files by base"), std::string::npos);
}

TEST_F(ConfigTest, EnvironmentVariablesAreExpandedInValues) {
  ::setenv("TESSERA_TEST_STEPS", "12", 1);
  ::unsetenv("TESSERA_TEST_NONE");
  const Config config = load(base(), {"train.steps=${env:TESSERA_TEST_STEPS}",
                                      "train.log=logs/${env:TESSERA_TEST_NONE:-x}.jsonl"});
  EXPECT_EQ(config.train.steps, 12);
  EXPECT_EQ(config.train.log, "logs/x.jsonl");
  EXPECT_NE(override_error("train.log=${env:TESSERA_TEST_NONE}")
                .find("environment variable TESSERA_TEST_NONE is not set"),
            std::string::npos);
  ::unsetenv("TESSERA_TEST_STEPS");
}

TEST_F(ConfigTest, DumpsLoadAsTheSameConfig) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}, mixed_precision: "
       "{param_dtype: "
       "bfloat16}}"},
      {"parallel={type: DistributedDataParallel, comm_hook: {type: power_sgd, rank: 4}}"},
      {"parallel={type: FullyShardedDataParallel, sharding_strategy: NO_SHARD, ignored_modules: a, "
       "ignored_parameters: [b, c.d], cpu_offload: {offload_params: true}}"},
      {"parallel={type: ZeroRedundancyOptimizer, optimizer_type: AdamW}",
       "train.clip_grad_value=0.5"},
      {"parallel={type: DistributedOptimizer, reduce_method: sum}", "train.loss_scale=dynamic",
       "train.autocast=bfloat16"},
      {"scheduler={type: chained, schedules: [{type: linear, end: 2}, {type: cosine, t_max: 5, "
       "begin: 2}]}",
       "train.sample={length: 3, prompt: \"a: b\"}"},
      {"optimizer.paramwise={norm_decay_mult: 0, custom_keys: {transformer.h.0: {lr_mult: 0.5, "
       "decay_mult: 0}}}",
       "checkpoint={folder: c, every: 3}", "train.ema.decay=0.99",
       "data_preprocessor={type: normalize, mean: [0.5]}"},
  };
  for (const auto& overrides : cases) {
    const Config config = load(base(), overrides);
    for (const bool full : {true, false}) {
      const std::string text = config.dump(full);
      std::ofstream("dump.yaml") << text;
      Config again;
      ASSERT_NO_THROW(again = load_config("dump.yaml")) << text;
      EXPECT_EQ(again.dump(full), text);
      EXPECT_EQ(again.dump(true), config.dump(true)) << text;
    }
    EXPECT_LT(config.dump(false).size(), config.dump(true).size());
  }
  EXPECT_EQ(load(base()).dump(false).find("n_inner"), std::string::npos);
}

TEST_F(ConfigTest, ItemsOfListsAreOverriddenByIndex) {
  const std::string chained = base() +
                              "scheduler: {type: chained, schedules: [{type: linear, end: 2}, "
                              "{type: constant, begin: 2}]}\n";
  EXPECT_EQ(error(chained, {"scheduler.schedules.0.start_factor=0.5"}), "");
  EXPECT_NE(error(chained, {"scheduler.schedules.2.begin=3"})
                .find("\"2\" in a list of 2; expected an index below 2, counted from 0"),
            std::string::npos);
  EXPECT_NE(error(chained, {"scheduler.schedules.0.start=0.5"})
                .find("scheduler.schedules.0.start: unknown key"),
            std::string::npos);
}

TEST_F(ConfigTest, TheOptimizerIsNamedByWrapperOrBySection) {
  const std::string rest = std::string(kModel) + kData + kTrain;
  EXPECT_EQ(error(rest, {"parallel={type: ZeroRedundancyOptimizer, optimizer_type: Adam}"}), "");
  EXPECT_EQ(load(rest, {"parallel={type: ZeroRedundancyOptimizer, optimizer_type: Adam}",
                        "optimizer.lr=0.5"})
                .optimizer.type,
            "Adam");
  EXPECT_NE(error(rest, {"parallel.type=ZeroRedundancyOptimizer"}).find("optimizer"),
            std::string::npos);
  EXPECT_NE(override_error("parallel={type: ZeroRedundancyOptimizer, optimizer_type: Adam}")
                .find("AdamW, and parallel.optimizer_type is Adam"),
            std::string::npos);
  EXPECT_NE(override_error("parallel={type: ZeroRedundancyOptimizer, optimizer_type: Adan}")
                .find("did you mean \"Adam\"?"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera
