#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tessera/detail/name_pattern.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/models/gpt2.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

void require_size(const char* name, int64_t value) {
  // 2^31 is far above the size of any model, and the product of two such sizes fits int64.
  if (value < 1 || value > int64_t{1} << 31) {
    throw UsageError("GPT2: " + std::string(name) + " is " + std::to_string(value) +
                     ", expected 1 to 2^31");
  }
}

bool matches_block(const std::string& pattern, size_t block) {
  return detail::matches_name(pattern.c_str(), ("transformer.h." + std::to_string(block)).c_str());
}

void require_probability(const char* name, double value) {
  if (!(value >= 0 && value < 1)) {
    throw UsageError("GPT2: " + std::string(name) + " is " + std::to_string(value) +
                     ", expected [0, 1)");
  }
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

/// Reads the keys of a config.json and checks their types. A missing key leaves the value
/// unchanged.
class ConfigReader {
 public:
  explicit ConfigReader(const std::string& path) : path_(path), json_(parse_file(path)) {}

  template <class Value>
  void set(const char* key, Value& value) const {
    const Json* found = find(key);
    if (found == nullptr) return;
    constexpr bool integer = std::is_same_v<Value, int64_t>, number = std::is_same_v<Value, double>,
                   flag = std::is_same_v<Value, bool>;
    const bool fits = integer  ? found->is_number_integer() && (!found->is_number_unsigned() ||
                                                               found->get<uint64_t>() >> 62 == 0)
                      : number ? found->is_number()
                      : flag   ? found->is_boolean()
                               : found->is_string();
    if (!fits)
      refuse(key, *found,
             integer  ? "an integer"
             : number ? "a number"
             : flag   ? "true or false"
                      : "a string");
    value = found->get<Value>();
  }
  /// Refuses every value but `only`, for a key that selects arithmetic this model does not have.
  void fixed(const char* key, const Json& only) const {
    const Json* found = find(key);
    if (found != nullptr && *found != only)
      refuse(key, *found, only.dump() + " (all that this model supports)");
  }

  [[noreturn]] void refuse(const char* key, const Json& value, const std::string& expected) const {
    throw UsageError("GPT2: " + path_ + ": \"" + key + "\" is " +
                     value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 80) +
                     ", expected " + expected);
  }

 private:
  const Json* find(const char* key) const {
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  std::string path_;
  Json json_;
};

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

void GPT2Options::validate() const {
  require_size("vocab_size", vocab_size);
  require_size("n_positions", n_positions);
  require_size("n_embd", n_embd);
  require_size("n_layer", n_layer);
  require_size("n_head", n_head);
  require_size("activation_checkpointing_every", activation_checkpointing_every);
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
  if (n_inner != 0) require_size("n_inner", n_inner);
  if (n_embd % n_head != 0) {
    throw UsageError("GPT2: n_head is " + std::to_string(n_head) +
                     ", which does not divide n_embd, " + std::to_string(n_embd));
  }
  require_probability("embd_pdrop", embd_pdrop);
  require_probability("attn_pdrop", attn_pdrop);
  require_probability("resid_pdrop", resid_pdrop);
  if (!(layer_norm_epsilon > 0 && std::isfinite(layer_norm_epsilon))) {
    throw UsageError("GPT2: layer_norm_epsilon is " + std::to_string(layer_norm_epsilon) +
                     ", expected above 0");
  }
  if (!(initializer_range >= 0 && std::isfinite(initializer_range))) {
    throw UsageError("GPT2: initializer_range is " + std::to_string(initializer_range) +
                     ", expected 0 or above");
  }
  if (activation != "gelu_new" && activation != "gelu" && activation != "relu") {
    throw UsageError("GPT2: activation is \"" + activation + "\", known are gelu_new, gelu, relu" +
                     did_you_mean(activation, {"gelu_new", "gelu", "relu"}));
  }
}

GPT2Options GPT2Options::from_config_json(const std::string& path) {
  const ConfigReader config(path);
  GPT2Options options;
  config.fixed("model_type", "gpt2");
  config.fixed("scale_attn_weights", true);
  config.fixed("scale_attn_by_inverse_layer_idx", false);
  config.fixed("add_cross_attention", false);
  config.set("vocab_size", options.vocab_size);
  config.set("n_positions", options.n_positions);
  config.set("n_embd", options.n_embd);
  config.set("n_layer", options.n_layer);
  config.set("n_head", options.n_head);
  config.set("n_inner", options.n_inner);
  config.set("layer_norm_epsilon", options.layer_norm_epsilon);
  config.set("initializer_range", options.initializer_range);
  config.set("embd_pdrop", options.embd_pdrop);
  config.set("attn_pdrop", options.attn_pdrop);
  config.set("resid_pdrop", options.resid_pdrop);
  config.set("tie_word_embeddings", options.tie_word_embeddings);
  config.set("activation_function", options.activation);
  if (options.activation == "gelu_pytorch_tanh")
    options.activation = "gelu_new";  // another name of Hugging Face for the same function
  try {
    options.validate();
  } catch (const UsageError& error) {
    throw UsageError(path + ": " + error.what());
  }
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
