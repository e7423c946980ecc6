#include "train/config_sections.h"

#include "tessera/error.h"

namespace tessera::train {
namespace {

constexpr Range kAtLeastOne{1};

void read_prompt(MapReader& keys, const DataConfig& data, std::vector<int64_t>& prompt) {
  const ConfigNode* node = keys.take("prompt");
  if (data.type != "ByteText" && node == nullptr) {
    prompt = {0};
  }
  if (node == nullptr) {
    return;
  }
  prompt.clear();
  if (node->kind == ConfigNode::Kind::Sequence) {
    for (const auto& item : node->items) {
      const auto token = parse_integer(item);
      if (!token || *token < 0) {
        fail_at(item, keys.full("prompt"), item.describe() + "; expected a token, a whole number >= 0");
      }
      prompt.push_back(*token);
    }
  } else if (node->kind == ConfigNode::Kind::Scalar && data.type == "ByteText") {
    for (const char byte : node->text) {
      prompt.push_back(static_cast<unsigned char>(byte));
    }
  } else {
    keys.fail("prompt", node->describe() + "; expected " +
                            (data.type == "ByteText" ? "a text" : "a list of tokens (a TokenBin has no text)"));
  }
  if (prompt.empty()) {
    keys.fail("prompt", "empty; expected at least one token");
  }
}

void read_sample(MapReader keys, const Config& config, SampleConfig& sample) {
  sample.length = 200;
  keys.read("length", sample.length, kNotNegative);
  keys.read("temperature", sample.options.temperature, kNotNegative);
  keys.read("top_k", sample.options.top_k, kNotNegative);
  keys.read("seed", sample.seed);
  read_prompt(keys, config.data, sample.prompt);
  keys.finish();
  for (const int64_t token : sample.prompt) {
    if (sample.length > 0 && token >= config.model.gpt2.vocab_size) {
      keys.fail("prompt", "token " + std::to_string(token) + "; expected tokens below model.vocab_size (" +
                              std::to_string(config.model.gpt2.vocab_size) + ")");
    }
  }
}

}  // namespace

void read_model(MapReader keys, ModelConfig& model) {
  keys.require("type", "GPT2");
  keys.read_choice("type", model.type, {"GPT2"});
  GPT2Options& gpt2 = model.gpt2;
  std::string config_json;
  keys.read_path("config", config_json);
  if (!config_json.empty()) {
    try {
      gpt2 = GPT2Options::from_config_json(config_json);
    } catch (const UsageError& error) {
      keys.fail("config", error.what());
    }
  }
  keys.read_path("init", model.init);
  keys.read("seed", gpt2.seed);
  keys.read("vocab_size", gpt2.vocab_size, kAtLeastOne);
  keys.read("n_positions", gpt2.n_positions, kAtLeastOne);
  keys.read("n_embd", gpt2.n_embd, kAtLeastOne);
  keys.read("n_layer", gpt2.n_layer, kAtLeastOne);
  keys.read("n_head", gpt2.n_head, kAtLeastOne);
  keys.read("n_inner", gpt2.n_inner, kNotNegative);
  keys.read("layer_norm_epsilon", gpt2.layer_norm_epsilon, kPositive);
  keys.read("initializer_range", gpt2.initializer_range, kPositive);
  keys.read("tie_word_embeddings", gpt2.tie_word_embeddings);
  keys.read_choice("activation", gpt2.activation, {"gelu_new", "gelu", "relu"});
  std::optional<double> dropout;
  keys.read("dropout", dropout, kProbability);
  if (dropout) {
    gpt2.embd_pdrop = gpt2.attn_pdrop = gpt2.resid_pdrop = *dropout;
  }
  keys.finish();
  if (gpt2.n_embd % gpt2.n_head != 0) {
    keys.fail("n_head", std::to_string(gpt2.n_head) + " does not divide n_embd (" + std::to_string(gpt2.n_embd) +
                            "); expected a divisor of it");
  }
  try {
    gpt2.validate();
  } catch (const UsageError& error) {
    throw UsageError(keys.where() + ": model: " + error.what());
  }
}

void read_data(MapReader keys, const ModelConfig& model, DataConfig& data) {
  keys.require("type", "ByteText or TokenBin");
  keys.require("path", "the training text or tokens");
  keys.read_choice("type", data.type, {"ByteText", "TokenBin"});
  keys.read_paths("path", data.paths);
  keys.read_paths("val_path", data.val_paths);
  data.batches.seq_len = model.gpt2.n_positions;
  keys.read("seq_len", data.batches.seq_len, kAtLeastOne);
  std::string order = "shuffled";
  keys.read_choice("order", order, {"shuffled", "sequential"});
  data.batches.order = order == "shuffled" ? BatchOptions::Order::shuffled : BatchOptions::Order::sequential;
  keys.read("seed", data.batches.seed);
  keys.read_choice("uneven", data.uneven, {"error", "drop", "join"});
  if (data.type == "TokenBin") {
    keys.refuse("val_fraction", "a TokenBin file is all training data; name an evaluation file with data.val_path");
  } else if (!data.val_paths.empty()) {
    keys.refuse("val_fraction", "data.val_path names the evaluation text already; give one of the two");
  } else {
    keys.read("val_fraction", data.val_fraction, kProbability);
  }
  keys.finish();
  if (data.paths.empty()) {
    keys.fail("path", "no path; expected the training text or tokens");
  }
  if (data.type == "TokenBin" && (data.paths.size() > 1 || data.val_paths.size() > 1)) {
    keys.fail(data.paths.size() > 1 ? "path" : "val_path", "several files; a TokenBin takes one");
  }
  if (data.batches.seq_len > model.gpt2.n_positions) {
    keys.fail("seq_len", std::to_string(data.batches.seq_len) + " is longer than model.n_positions (" +
                             std::to_string(model.gpt2.n_positions) + "); expected at most that");
  }
}

void read_scheduler(MapReader keys, SchedulerConfig& scheduler) {
  keys.read_choice("type", scheduler.type, {"none", "constant", "warmup_cosine"});
  if (scheduler.type == "none") {
    for (const char* key : {"warmup_steps", "decay_steps", "min_lr"}) {
      keys.refuse(key, "has no meaning without a scheduler; set scheduler.type to constant or warmup_cosine");
    }
  } else {
    keys.read("warmup_steps", scheduler.warmup_steps, kNotNegative);
  }
  if (scheduler.type == "constant") {
    for (const char* key : {"decay_steps", "min_lr"}) {
      keys.refuse(key, "belongs to scheduler.type warmup_cosine, and the type is constant");
    }
  } else if (scheduler.type == "warmup_cosine") {
    keys.read("decay_steps", scheduler.decay_steps, kNotNegative);
    keys.read("min_lr", scheduler.min_lr, kNotNegative);
  }
  keys.finish();
  if (scheduler.decay_steps > 0 && scheduler.decay_steps < scheduler.warmup_steps) {
    keys.fail("decay_steps", std::to_string(scheduler.decay_steps) +
                                 " is before the end of the warm-up; expected at least " +
                                 std::to_string(scheduler.warmup_steps));
  }
}

void read_train(MapReader keys, const Config& config, RunConfig& run) {
  keys.require("steps", "the number of steps");
  keys.require("global_batch", "the number of sequences a step, over all ranks");
  keys.read("steps", run.steps, kNotNegative);
  keys.read("global_batch", run.global_batch, kAtLeastOne);
  keys.read_path("log", run.log);
  keys.read("log_every", run.log_every, kAtLeastOne);
  keys.read_path("save", run.save);
  keys.read("save_config", run.save_config);
  keys.read("eval_every", run.eval_every, kNotNegative);
  keys.read("eval_batches", run.eval_batches, kNotNegative);
  keys.read("clip_grad_norm", run.clip_grad_norm, kPositive);
  auto sample = keys.optional_map("sample");
  keys.finish();
  if (sample) {
    read_sample(*sample, config, run.sample);
  }
  if (run.save_config && run.save.empty()) {
    keys.fail("save_config", "true, but train.save names no file to put it beside");
  }
}

}  // namespace tessera::train
