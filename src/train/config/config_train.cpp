#include <algorithm>
#include <cmath>

#include "tessera/error.h"
#include "tessera/save_weights.h"
#include "train/config/config_sections.h"

namespace tessera::train {
namespace {

using Kind = ConfigNode::Kind;

void read_prompt(OptionReader& keys, bool text, std::vector<int64_t>& prompt) {
  const ConfigNode standard = text ? ConfigNode::scalar("The ", true) : ConfigNode{};
  const ConfigNode* node =
      keys.take("prompt", "a text, or a list of tokens", "beginning of the sample", standard);
  if (node == nullptr) {
    if (!text) prompt = {0};
    return;
  }
  prompt.clear();
  if (node->kind == Kind::Scalar && text) {
    for (const char byte : node->text) prompt.push_back(static_cast<unsigned char>(byte));
  } else if (node->kind == Kind::Sequence) {
    for (const auto& item : node->items) {
      const OptionValue value = OptionReader::value_of(item, keys.full("prompt"));
      const auto* token = std::get_if<int64_t>(&value);
      if (token == nullptr || *token < 0)
        fail_at(item, keys.full("prompt"),
                item.describe() + "; expected a token, a whole number >= 0");
      prompt.push_back(*token);
    }
  } else {
    keys.fail("prompt", node->describe() + "; expected " +
                            (text ? "a text" : "a list of tokens (a TokenBin has no text)"));
  }
  if (prompt.empty()) keys.fail("prompt", "empty; expected at least one token");
}

void read_sample(OptionReader keys, const Config& config, SampleConfig& sample) {
  const bool wanted = keys.node() != nullptr;
  int64_t length = wanted || keys.describing() ? 200 : 0;
  keys.read("length", length, "tokens to generate after the training, if this section is there",
            kNotNegative);
  keys.read("temperature", sample.temperature,
            "sampling temperature; 0: always the most likely token", kNotNegative);
  keys.read("top_k", sample.top_k, "sample from the k most likely tokens; 0: from all",
            kNotNegative);
  keys.read("seed", sample.seed, "seed of the sample");
  read_prompt(keys, config.data.plan.text, sample.prompt);
  keys.finish();
  if (keys.describing()) return;
  sample.length = length;
  for (const int64_t token : sample.prompt) {
    if (sample.length > 0 && config.model.plan.vocab_size > 0 &&
        token >= config.model.plan.vocab_size) {
      keys.fail("prompt", "token " + std::to_string(token) +
                              "; expected tokens below model.vocab_size (" +
                              std::to_string(config.model.plan.vocab_size) + ")");
    }
  }
  if (sample.length > 0 && config.model.plan.vocab_size == 0)
    keys.fail("length", "model " + config.model.type + " is no language model; expected no sample");
}

/// `dynamic`, a map of options, or a number: a constant scale.
void read_loss_scale(OptionReader& keys, GradScalerOptions& scaler) {
  const ConfigNode* node =
      keys.take("loss_scale", "dynamic, a map of its options, a number > 0, or null",
                "factor of the loss, so that small gradients do not vanish in float16");
  if (keys.describing()) {
    OptionReader inner = keys.map("loss_scale");
    GradScalerOptions(scaler).read(inner);
  }
  if (node == nullptr || node->kind == Kind::Null) return;
  scaler.enabled = true;
  if (node->kind == Kind::Map) {
    OptionReader inner(node, {keys.full("loss_scale")}, keys.where());
    scaler.read(inner);
    inner.finish();
    return;
  }
  const OptionValue value = OptionReader::value_of(*node, keys.full("loss_scale"));
  if (const auto* word = std::get_if<std::string>(&value); word != nullptr && *word == "dynamic")
    return;
  const auto* whole = std::get_if<int64_t>(&value);
  const auto* number = std::get_if<double>(&value);
  scaler.dynamic = false;
  scaler.init_scale = whole != nullptr    ? static_cast<double>(*whole)
                      : number != nullptr ? *number
                                          : 0;
  if (!(scaler.init_scale > 0))
    keys.fail("loss_scale", node->describe() + "; expected dynamic, or a number > 0");
}

void read_amp(OptionReader& keys, RunConfig& run) {
  keys.read_optional_enum("autocast", run.autocast,
                          {{"bfloat16", at::kBFloat16}, {"float16", at::kHalf}},
                          "dtype of operators for which it is safe; weights keep their dtype");
  read_loss_scale(keys, run.loss_scale);
}

/// The p of a norm: a number, or the word inf.
void read_norm_type(OptionReader& keys, double& norm_type) {
  const ConfigNode* node = keys.take("clip_norm_type", "a number > 0, or inf",
                                     "p of the norm of clip_grad_norm and of the log's grad_norm",
                                     ConfigNode::scalar("2"));
  if (node == nullptr) return;
  const OptionValue value = OptionReader::value_of(*node, keys.full("clip_norm_type"));
  const auto* word = std::get_if<std::string>(&value);
  const auto* whole = std::get_if<int64_t>(&value);
  const auto* number = std::get_if<double>(&value);
  norm_type = word != nullptr && (*word == "inf" || *word == ".inf") ? INFINITY
              : whole != nullptr                                     ? static_cast<double>(*whole)
              : number != nullptr                                    ? *number
                                                                     : 0;
  if (!(norm_type > 0))
    keys.fail("clip_norm_type", node->describe() + "; expected a number > 0, or inf");
}

void read_clipping(OptionReader& keys, RunConfig& run) {
  keys.read("clip_grad_norm", run.clip_grad_norm, "largest norm of the global mean gradient",
            kPositive);
  read_norm_type(keys, run.clip_norm_type);
  keys.read("clip_grad_value", run.clip_grad_value,
            "largest absolute value of an element of the gradient", kPositive);
}

void read_nonfinite(OptionReader& keys, RunConfig& run) {
  keys.read("error_if_nonfinite", run.error_if_nonfinite,
            "a norm of the gradient that is infinite or NaN ends the run before the update");
  keys.read_choice("on_nonfinite", run.on_nonfinite, {"stop", "skip", "rollback"},
                   "after a loss or a gradient that is not finite: stop ends the run, skip leaves "
                   "the step out, rollback goes back to the last checkpoint and leaves it out");
  keys.read("nonfinite_limit", run.nonfinite_limit,
            "most steps in a row that are skipped or rolled back", kAtLeastOne);
  keys.read("rollback_on_spike", run.rollback_on_spike,
            "a loss above this factor of the median of the last 100 losses is rolled back",
            Range{.min = 1, .min_open = true});
}

void read_replicas(OptionReader& keys, RunConfig& run) {
  keys.read("check_replicas", run.check_replicas,
            "steps from one comparison to the next of parameters, buffers and options that "
            "must be the same on several ranks; 0: never",
            kNotNegative);
  keys.read("repair_replicas", run.repair_replicas,
            "a tensor that differs gets the bits of the majority of its ranks; otherwise the run "
            "ends");
}

void read_watchdog(OptionReader& keys, WatchdogConfig& watchdog) {
  if (keys.has("watchdog") && !keys.given("watchdog"))
    keys.fail("watchdog", "null; expected a map of keys, in which factor: null is no watchdog");
  OptionReader inner = keys.map("watchdog");
  inner.read(
      "factor", watchdog.factor,
      "a step longer than this factor of the median of the last 100 steps ends the run, with "
      "the stacks of the ranks; null: no watchdog",
      kAtLeastOne);
  inner.read("least", watchdog.least, "seconds; shorter steps never end the run", kPositive);
  inner.read("other", watchdog.other,
             "longest time in seconds without progress outside of steps: start-up with the first "
             "step, a hook, one forward of an evaluation, one tensor of a checkpoint",
             kPositive);
  inner.finish();
}

}  // namespace

void read_ranking(OptionReader& keys, Ranking& ranking) {
  const bool other = keys.given("metric");
  keys.read("metric", ranking.metric,
            "figure of the evaluation that is compared: loss, or one of the metrics");
  // With a default, half of the metrics would keep the worst.
  if (other && ranking.metric != "loss") keys.require("mode", "max or min");
  keys.read_enum("mode", ranking.larger, {{"min", false}, {"max", true}},
                 "which values are better");
}

void read_step(OptionReader& keys, RunConfig& run) {
  read_clipping(keys, run);
  read_amp(keys, run);
}

void read_ema(OptionReader& keys, EmaConfig& ema) {
  OptionReader inner = keys.map("ema");
  inner.read("decay", ema.decay,
             "decay of the weights' moving average, which is evaluated and saved instead of them; "
             "null: none",
             kProbability);
  inner.read("warmup", ema.warmup, "smaller decay in the first steps");
  inner.finish();
}

namespace {

void read_early_stop(OptionReader& keys, RunConfig& run) {
  OptionReader stop = keys.map("early_stop");
  stop.read("patience", run.early_stop.patience,
            "evaluations without an improvement after which the run ends; 0: never", kNotNegative);
  stop.read("min_delta", run.early_stop.min_delta,
            "smallest change of the metric that counts as an improvement", kNotNegative);
  read_ranking(stop, run.early_stop.ranking);
  stop.finish();
}

/// Samples are counted in 64 bits. Twice this number still fits, which is enough for rounding up to
/// whole iterations of any world size.
constexpr int64_t kMostSamples = int64_t{1} << 62;
constexpr int64_t kLargestBatch = int64_t{1} << 31;

void check_counts(const OptionReader& keys, const RunConfig& run) {
  const std::string batch = std::to_string(run.global_batch);
  if (run.global_batch > kLargestBatch)
    keys.fail("global_batch", batch + "; expected at most " + std::to_string(kLargestBatch));
  for (const auto& [key, count] :
       {std::pair("steps", run.steps), std::pair("eval_batches", run.eval.batches)}) {
    const int64_t most = kMostSamples / std::max<int64_t>(run.global_batch, 1);
    if (count > most)
      keys.fail(key, std::to_string(count) + " times a train.global_batch of " + batch +
                         "; expected at most " + std::to_string(most));
  }
}

void check_save_optimizer(const OptionReader& keys, const RunConfig& run) {
  if (run.save_optimizer.empty()) return;
  if (!is_torch_path(run.save_optimizer))
    keys.fail("save_optimizer", run.save_optimizer +
                                    "; expected a name that ends in .pt, .pth or .bin: the file is "
                                    "for torch.load");
  if (run.ema.decay)
    keys.fail("save_optimizer",
              "belongs to the weights before averaging, and train.save has those of train.ema; "
              "expected one of the two");
}

}  // namespace

void read_train(OptionReader& keys, const Config& config, RunConfig& run) {
  if (config.data.type.empty() && !keys.describing()) {
    run.log_every = 0;  // standard output belongs to the program
  } else {
    if (!keys.has("epochs")) keys.require("steps", "the number of steps");
    keys.require("global_batch", "the number of sequences a step, over all ranks");
  }
  keys.read("steps", run.steps, "number of updates; 0: only evaluate and save", kNotNegative);
  keys.read("epochs", run.epochs,
            "passes over the training data, instead of steps; 0: steps is used", kNotNegative);
  keys.read("global_batch", run.global_batch, "samples per step over all ranks", kAtLeastOne);
  const bool several = !config.models.empty();  // then these keys belong to the models
  if (!several) {
    keys.read("accumulation", run.accumulation,
              "micro-batches into which a rank splits its samples of a step", kAtLeastOne);
    read_step(keys, run);
    read_ema(keys, run.ema);
  }
  keys.read_path("log", run.log, "file for JSON lines, one per step");
  keys.read("log_every", run.log_every,
            "steps per printed line; 0, which is the default without a section data: nothing is "
            "printed but warnings, on standard error",
            kNotNegative);
  keys.read_path("save", run.save,
                 "file of the final weights, for torch.load if it ends in .pt, .pth or .bin, else "
                 "safetensors; with / at its end, a folder to which every rank writes its part of "
                 "them, and which gets the other files of a folder model.init");
  keys.read_path("save_optimizer", run.save_optimizer,
                 "file of the optimizer's final state, for load_state_dict() of the optimizer of "
                 "the same type in Python's torch.optim; its name ends in .pt, .pth or .bin");
  int64_t shard_mb = 0;
  keys.read("max_shard_mb", shard_mb,
            "megabytes (10^6) of each file in a folder save; 0: any number", Range{0, 1e12});
  run.max_shard_bytes = static_cast<uint64_t>(shard_mb) * 1'000'000;
  keys.read("save_config", run.save_config, "also write config.json next to save");
  keys.read("eval_every", run.eval.every, "steps per evaluation; 0: only at the end", kNotNegative);
  keys.read("eval_batches", run.eval.batches, "global batches per evaluation; 0: all samples",
            kNotNegative);
  keys.read("eval_batch", run.eval.batch, "samples of a rank in one forward of an evaluation",
            kAtLeastOne);
  read_nonfinite(keys, run);
  read_replicas(keys, run);
  read_watchdog(keys, run.watchdog);
  read_early_stop(keys, run);
  OptionReader sample = keys.map("sample");
  if (keys.describing()) read_sample(sample, config, run.sample);
  keys.finish();
  if (!several) read_sample(std::move(sample), config, run.sample);
  check_counts(keys, run);
  if (run.save_config && run.save.empty())
    keys.fail("save_config", "true, but train.save names no file to put it beside");
  check_save_optimizer(keys, run);
  if (run.steps > 0 && run.epochs > 0)
    keys.fail("epochs", "train.steps is given, too; expected one of the two");
  if (run.early_stop.patience > 0 && run.eval.every == 0)
    keys.fail("early_stop", "looks at evaluations; expected train.eval_every > 0");
}

}  // namespace tessera::train
