#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/config/option_reader.h"
#include "tessera/detail/name_pattern.h"
#include "tessera/error.h"
#include "tessera/models/gpt2.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// 2^31 is far above the size of any model, and the product of two such sizes fits int64.
constexpr double kMostSize = 2147483648.0;
constexpr Range kSize{1, kMostSize};

bool matches_block(const std::string& pattern, size_t block) {
  return detail::matches_name(pattern.c_str(), ("transformer.h." + std::to_string(block)).c_str());
}

Json parse_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw UsageError("GPT2: " + path + ": cannot be opened");
  std::stringstream text;
  text << file.rdbuf();
  Json json;
  try {
    json = Json::parse(text.str());
  } catch (const Json::parse_error& error) {
    throw UsageError("GPT2: " + path + ": is not valid JSON at byte " + std::to_string(error.byte));
  }
  if (!json.is_object()) throw UsageError("GPT2: " + path + ": a JSON object is expected");
  return json;
}

/// The keys of a config.json, without those that are null, by the names of the options.
ConfigNode options_in(const std::string& path) {
  ConfigNode node;
  node.kind = ConfigNode::Kind::Map;
  node.where = path;
  const Json json = parse_file(path);
  for (const auto& [key, value] : json.items()) {
    if (value.is_null()) continue;
    const bool text = value.is_string();
    node.members.push_back(
        {key == "activation_function" ? "activation" : key,
         ConfigNode::scalar(text ? value.get<std::string>() : value.dump(), text)});
    ConfigNode& option = node.members.back().value;
    option.where = path;
    if (option.text == "gelu_pytorch_tanh")
      option.text = "gelu_new";  // another name of Hugging Face for the same function
  }
  return node;
}

}  // namespace

std::vector<bool> GPT2Options::recomputed_blocks() const {
  std::vector<bool> result(static_cast<size_t>(n_layer), false);
  int64_t chosen = 0;
  for (size_t i = 0; activation_checkpointing && i < result.size(); ++i) {
    const auto& patterns = activation_checkpointing_blocks;
    const bool matches = patterns.empty() || std::any_of(patterns.begin(), patterns.end(),
                                                         [&](const std::string& pattern) {
                                                           return matches_block(pattern, i);
                                                         });
    result[i] = matches && chosen++ % activation_checkpointing_every == 0;
  }
  return result;
}

void GPT2Options::read(OptionReader& options) {
  options.read("vocab_size", vocab_size, "number of tokens", kSize);
  options.read("n_positions", n_positions, "length of the longest sequence", kSize);
  options.read("n_embd", n_embd, "width of the embeddings", kSize);
  options.read("n_layer", n_layer, "number of blocks", kSize);
  options.read("n_head", n_head, "attention heads; must divide n_embd", kSize);
  options.read("n_inner", n_inner, "width of the MLP; 0: 4 · n_embd", Range{0, kMostSize});
  options.read("layer_norm_epsilon", layer_norm_epsilon, "epsilon of the layer norms", kPositive);
  options.read("initializer_range", initializer_range, "standard deviation of initial weights",
               kNotNegative);
  options.read("tie_word_embeddings", tie_word_embeddings,
               "the output head shares the token embedding");
  options.read_choice("activation", activation, {"gelu_new", "gelu", "relu"},
                      "activation of the MLP");
}

void GPT2Options::validate() const {
  check_options("GPT2", *this);
  check_option("GPT2", "activation_checkpointing_every", activation_checkpointing_every, kSize);
  check_option("GPT2", "embd_pdrop", embd_pdrop, kProbability);
  check_option("GPT2", "attn_pdrop", attn_pdrop, kProbability);
  check_option("GPT2", "resid_pdrop", resid_pdrop, kProbability);
  for (const auto& pattern : activation_checkpointing_blocks) {
    bool found = false;
    for (int64_t i = 0; i < n_layer && !found; ++i)
      found = matches_block(pattern, static_cast<size_t>(i));
    if (!found) {
      throw UsageError(
          "GPT2: activation_checkpointing_blocks: \"" + pattern +
          "\" matches no block; expected names from transformer.h.0 to transformer.h." +
          std::to_string(n_layer - 1) + ", or a pattern such as transformer.h.*");
    }
  }
  if (n_embd % n_head != 0) {
    throw UsageError("GPT2: n_head is " + std::to_string(n_head) +
                     ", which does not divide n_embd, " + std::to_string(n_embd));
  }
}

GPT2Options GPT2Options::from_config_json(const std::string& path) {
  const ConfigNode node = options_in(path);
  OptionReader config(&node, {}, path);
  std::string type = "gpt2";
  config.read_choice("model_type", type, {"gpt2"}, "");
  for (const auto& [key, only] :
       {std::pair("scale_attn_weights", true), std::pair("scale_attn_by_inverse_layer_idx", false),
        std::pair("add_cross_attention", false)}) {
    bool value = only;
    config.read(key, value, "");
    if (value != only)
      config.fail(key, fmt::format("{}; expected {}, all that this model supports", value, only));
  }
  GPT2Options options;
  options.read(config);
  config.read("embd_pdrop", options.embd_pdrop, "", kProbability);
  config.read("attn_pdrop", options.attn_pdrop, "", kProbability);
  config.read("resid_pdrop", options.resid_pdrop, "", kProbability);
  named(path + ": ", [&] { options.validate(); });
  return options;
}

std::string GPT2Options::to_config_json() const {
  const Json config = {{"architectures", {"GPT2LMHeadModel"}},
                       {"model_type", "gpt2"},
                       {"vocab_size", vocab_size},
                       {"n_positions", n_positions},
                       {"n_ctx", n_positions},
                       {"n_embd", n_embd},
                       {"n_layer", n_layer},
                       {"n_head", n_head},
                       {"n_inner", n_inner == 0 ? Json(nullptr) : Json(n_inner)},
                       {"activation_function", activation},
                       {"layer_norm_epsilon", layer_norm_epsilon},
                       {"initializer_range", initializer_range},
                       {"embd_pdrop", embd_pdrop},
                       {"attn_pdrop", attn_pdrop},
                       {"resid_pdrop", resid_pdrop},
                       {"tie_word_embeddings", tie_word_embeddings},
                       {"torch_dtype", "float32"}};
  return config.dump(2) + "\n";
}

}  // namespace tessera
