#include "tessera/error.h"
#include "train/builtins/builtin.h"
#include "train/config/config_sections.h"

namespace tessera::train {
namespace {

using Kind = ConfigNode::Kind;

ConfigNode shown(const std::optional<OptionValue>& value) {
  return value ? parse_yaml(to_string(*value), "default", false) : ConfigNode{};
}

/// An option of an optimizer of this type, checked by its registry.
OptionValue checked(const OptimizerRegistry& registry, const std::string& type,
                    const std::string& option, const ConfigNode& node, const std::string& path) {
  const OptionValue value = OptionReader::value_of(node, path);
  try {
    registry.complete(type, {{option, value}});
  } catch (const UsageError& error) {
    fail_at(node, path, error.what());
  }
  return value;
}

void read_custom_keys(OptionReader& keys, const std::string& type, ParamwiseOptions& paramwise) {
  const ConfigNode* node =
      keys.take("custom_keys", "a map of name parts, each with lr_mult, decay_mult or options",
                "what parameters take whose names contain the key; the longest key wins");
  if (node == nullptr || node->kind == Kind::Null) {
    return;
  }
  OptionReader each(node, {"optimizer", "paramwise", "custom_keys"}, keys.where());
  for (const auto& name : each.unread()) {
    OptionReader reader = each.map(name);
    ParamwiseCustomKey key;
    reader.read("lr_mult", key.lr_mult, "", kNotNegative);
    reader.read("decay_mult", key.decay_mult, "", kNotNegative);
    for (const KnownOption& option : registry::optimizers().known_options(type)) {
      if (const ConfigNode* value = reader.take(option.name, "", "")) {
        key.options[option.name] =
            checked(registry::optimizers(), type, option.name, *value, reader.full(option.name));
      }
    }
    reader.finish();
    paramwise.custom_keys[name] = std::move(key);
  }
}

void read_paramwise(OptionReader& keys, const std::string& type, ParamwiseOptions& paramwise) {
  read_custom_keys(keys, type, paramwise);
  keys.read("bias_lr_mult", paramwise.bias_lr_mult, "of biases, but not of normalisations",
            kNotNegative);
  keys.read("bias_decay_mult", paramwise.bias_decay_mult, "of biases", kNotNegative);
  keys.read("norm_decay_mult", paramwise.norm_decay_mult, "of normalisations", kNotNegative);
  keys.read("flat_decay_mult", paramwise.flat_decay_mult, "of parameters of one dimension",
            kNotNegative);
  keys.read("dwconv_decay_mult", paramwise.dwconv_decay_mult, "of depth-wise convolutions",
            kNotNegative);
  keys.read("bypass_duplicate", paramwise.bypass_duplicate,
            "a tensor with several names counts once; off: an error");
  keys.finish();
}

}  // namespace

void describe_paramwise(OptionReader& keys) {
  ParamwiseOptions paramwise;
  read_paramwise(keys, "", paramwise);
}

void read_optimizer(OptionReader& keys, const ParallelConfig& parallel, OptimizerPlan& optimizer) {
  const OptimizerRegistry& registry = registry::optimizers();
  optimizer.type = parallel.plan.optimizer_type;
  if (optimizer.type.empty()) {
    keys.require("type", "the name of an optimizer");
  }
  keys.read_choice("type", optimizer.type, registry.names(), "the optimizer");
  if (optimizer.type.empty()) {
    // Without a type no option can be judged: only the missing type is reported.
    keys.rest();
    return keys.finish();
  }
  if (!parallel.plan.optimizer_type.empty() && optimizer.type != parallel.plan.optimizer_type) {
    keys.fail("type", optimizer.type + ", and parallel.optimizer_type is " +
                          parallel.plan.optimizer_type + "; expected one of the two");
  }
  if (optimizer.type == "LBFGS") {
    keys.fail("type",
              "LBFGS evaluates the loss several times a step, and the trainer does once; expected "
              "another");
  }
  for (const KnownOption& option : registry.known_options(optimizer.type)) {
    if (const ConfigNode* node =
            keys.take(option.name, option.expected, "", shown(option.standard))) {
      optimizer.options[option.name] =
          checked(registry, optimizer.type, option.name, *node, keys.full(option.name));
    }
  }
  OptionReader paramwise = keys.map("paramwise");
  read_paramwise(paramwise, optimizer.type, optimizer.paramwise);
  keys.finish();
}

}  // namespace tessera::train
