#include <fmt/format.h>

#include "tessera/error.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/image_classifier.h"
#include "tessera/models/mlp.h"
#include "train/builtins/builtin_components.h"

namespace tessera::train {
namespace {

/// true, false, or the names of blocks.
void read_activation_checkpointing(OptionReader& options, GPT2Options& gpt2) {
  const char* const key = "activation_checkpointing";
  const char* const expected = "true, false, or patterns of names of blocks";
  const ConfigNode* node =
      options.take(key, expected,
                   "compute the activations of each block again in backward instead of storing "
                   "them; a text or a list of texts: of the blocks whose names match one of them "
                   "(transformer.h.*)",
                   ConfigNode::scalar("false"));
  if (node == nullptr) return;
  const auto add = [&](const ConfigNode& item, const std::string* pattern) {
    if (pattern == nullptr || pattern->empty())
      fail_at(item, options.full(key), item.describe() + "; expected " + expected);
    gpt2.activation_checkpointing_blocks.push_back(*pattern);
  };
  gpt2.activation_checkpointing = true;
  if (node->kind == ConfigNode::Kind::Sequence && !node->items.empty()) {
    for (const auto& item : node->items) {
      const OptionValue value = OptionReader::value_of(item, options.full(key));
      add(item, std::get_if<std::string>(&value));
    }
    return;
  }
  if (node->kind != ConfigNode::Kind::Scalar) return add(*node, nullptr);
  const OptionValue value = OptionReader::value_of(*node, options.full(key));
  if (const auto* on = std::get_if<bool>(&value)) gpt2.activation_checkpointing = *on;
  else add(*node, std::get_if<std::string>(&value));
}

void read_gpt2_options(OptionReader& options, GPT2Options& gpt2) {
  std::string config_json;
  options.read_path("config", config_json,
                    "a Hugging Face config.json to start from; keys of this section override it");
  if (!config_json.empty())
    gpt2 = named(options.at("config"), [&] { return GPT2Options::from_config_json(config_json); });
  gpt2.read(options);
  read_activation_checkpointing(options, gpt2);
  options.read("activation_checkpointing_every", gpt2.activation_checkpointing_every,
               "do so for every n-th of these blocks only, beginning with the first", kAtLeastOne);
  std::optional<double> dropout;
  options.read("dropout", dropout,
               "probability of all three dropouts; null: those of config, else 0", kProbability);
  if (dropout) gpt2.embd_pdrop = gpt2.attn_pdrop = gpt2.resid_pdrop = *dropout;
  options.finish();
  if (gpt2.n_embd % gpt2.n_head != 0)
    options.fail("n_head", std::to_string(gpt2.n_head) + " does not divide n_embd (" +
                               std::to_string(gpt2.n_embd) + "); expected a divisor of it");
  named(options.where() + ": model: ", [&] { gpt2.validate(); });
}

ModelPlan read_gpt2(OptionReader& options) {
  GPT2Options gpt2;
  read_gpt2_options(options, gpt2);
  ModelPlan plan;
  plan.vocab_size = gpt2.vocab_size;
  plan.max_length = gpt2.n_positions;
  plan.meaning = {{"n_head", std::to_string(gpt2.n_head)},
                  {"activation", gpt2.activation},
                  {"layer_norm_epsilon", fmt::format("{}", gpt2.layer_norm_epsilon)}};
  plan.make = [gpt2](const ModelContext& context) {
    GPT2Options seeded = gpt2;
    seeded.seed = context.seed;
    const auto net = std::make_shared<GPT2Impl>(seeded);
    TrainedModel model = detail::trained_model(net);
    GPT2Impl* raw = net.get();
    model.match_weights = [raw](const TensorSource& weights, bool strict) {
      return raw->match_weights(weights, strict);
    };
    model.generate = [raw](const at::Tensor& prompt, int64_t count, double temperature,
                           int64_t top_k, at::Generator generator) {
      return raw->generate(prompt, count, {temperature, top_k}, std::move(generator));
    };
    model.config_json = gpt2.to_config_json();
    return model;
  };
  return plan;
}

ModelPlan read_image_classifier(OptionReader& options) {
  ImageClassifierOptions classifier;
  classifier.read(options);
  options.finish();
  ModelPlan plan;
  plan.classes = classifier.classes;
  plan.communicates = classifier.norm == "SyncBatchNorm";
  plan.make = [classifier](const ModelContext& context) {
    ImageClassifierOptions seeded = classifier;
    seeded.seed = context.seed;
    std::optional<ProcessGroup> group;
    if (seeded.norm == "SyncBatchNorm") group = context.group;
    return detail::trained_model(std::make_shared<ImageClassifierImpl>(seeded, group));
  };
  return plan;
}

}  // namespace

void add_models(registry::Models& models) {
  models.add("GPT2", read_gpt2, "GPT-2 (Radford et al., 2019), with Hugging Face's names");
  models.add("ImageClassifier", read_image_classifier, "a small residual network for images");
  models.add<MLP>("MLP", "a multi-layer perceptron");
}

}  // namespace tessera::train
