#include "tessera/train/devices.h"
#include "tessera/train/registries.h"
#include "train/config/config_sections.h"

namespace tessera::train {
namespace {

void read_key_map(OptionReader& keys, ModelConfig& model) {
  for (auto& rule : keys.list("key_map",
                              "rules that change the names of init's weights, applied in "
                              "order: a list of maps, each with pattern (a regular "
                              "expression) and replacement ($1: its first group)")) {
    NameRule read;
    rule.require("pattern", "a regular expression");
    rule.read("pattern", read.pattern, "what is replaced");
    rule.read("replacement", read.replacement, "what replaces each match");
    rule.finish();
    try {
      check_key_map({read});
    } catch (const UsageError& error) {
      keys.fail("key_map", error.what());
    }
    model.init_options.key_map.push_back(std::move(read));
  }
}

/// A pattern, a map, or a list of both.
void read_freeze(OptionReader& keys, std::vector<FreezeRule>& rules) {
  const char* const expected = "a pattern, a map with patterns and until, or a list of both";
  ConfigNode none;
  none.kind = ConfigNode::Kind::Sequence;
  const ConfigNode* node =
      keys.take("freeze", expected,
                "parameters that are not trained, by name: * any characters but dots, ** any, ? "
                "one; with until, a number of steps, they are trained from that step on",
                none);
  if (node == nullptr || node->kind == ConfigNode::Kind::Null) return;
  const auto add = [&](const ConfigNode& item) {
    if (item.kind == ConfigNode::Kind::Scalar) return rules.push_back({{item.text}, 0});
    if (item.kind != ConfigNode::Kind::Map)
      fail_at(item, keys.full("freeze"), item.describe() + "; expected " + expected);
    OptionReader rule(&item, {keys.full("freeze")}, keys.where());
    FreezeRule read;
    rule.require("patterns", "names of parameters");
    rule.read("patterns", read.patterns, "names of parameters");
    rule.read("until", read.until, "the first step that trains them", kAtLeastOne);
    rule.finish();
    if (read.patterns.empty())
      fail_at(item, keys.full("freeze") + ".patterns", "[]; expected names of parameters");
    rules.push_back(std::move(read));
  };
  if (node->kind == ConfigNode::Kind::Sequence) {
    for (const auto& item : node->items) add(item);
  } else {
    add(*node);
  }
}

void read_model_keys(OptionReader& keys, ModelConfig& model) {
  keys.require("type", "the name of a model");
  keys.read_choice("type", model.type, registry::models().names(), "the model");
  keys.read_path(
      "init", model.init,
      "initial weights: a file of safetensors or torch.save, an index, or a folder that has one of "
      "them");
  keys.read("init_key", model.init_options.key,
            "the dict with the weights in a file of torch.save that has several; keys within keys "
            "are divided by /");
  read_key_map(keys, model);
  keys.read("strict", model.strict,
            "names of weights that are missing in init or unexpected are an error; otherwise they "
            "are listed");
  keys.read("seed", model.seed, "seed of the initial weights and of dropout");
  read_freeze(keys, model.freeze);
  keys.read_optional_enum<bool>(
      "deferred", model.deferred, {{"true", true}, {"false", false}},
      "construct without memory for parameters, which the wrapper then computes one by one; null: "
      "with FullyShardedDataParallel on CPUs");
  keys.read("device", model.device,
            "cpu, cuda (the device numbered as the rank on its host) or cuda:N (this one)");
  if (const auto problem = device_problem(model.device); !problem.empty())
    keys.fail("device", problem);
  keys.read_optional_enum<at::ScalarType>(
      "param_dtype", model.param_dtype, {{"bfloat16", at::kBFloat16}, {"float32", at::kFloat}},
      "dtype to which the model's parameters are converted; of bfloat16 the optimizer updates "
      "float32 copies");
}

}  // namespace

void read_model(OptionReader& keys, ModelConfig& model) {
  read_model_keys(keys, model);
  if (model.type.empty()) {
    keys.accept_rest();  // without a type the options are unknown
    return keys.finish();
  }
  model.plan = registry::models().read(model.type, keys);
}

void describe_model(OptionReader& keys) {
  ModelConfig model;
  read_model_keys(keys, model);
}

}  // namespace tessera::train
