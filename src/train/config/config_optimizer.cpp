#include "tessera/error.h"
#include "tessera/train/registries.h"
#include "train/config/config_sections.h"

namespace tessera::train {
namespace {

using Kind = ConfigNode::Kind;

/// Reads lr_mult, decay_mult and any option of the optimizer, and keeps only the options in `node`.
/// `base`: the options of the optimizer, so that options are checked together with them.
ParamwiseCustomKey read_custom_key(const ConfigNode& node, const std::string& type,
                                   const OptionMap& base, std::vector<std::string> path) {
  ConfigNode merged = options_node(base, node.where);
  for (const auto& member : node.members)
    if (ConfigNode* known = merged.find(member.key)) *known = member.value;
    else merged.members.push_back(member);
  OptionReader reader(&merged, std::move(path), node.where);
  ParamwiseCustomKey key;
  reader.read("lr_mult", key.lr_mult, "", kNotNegative);
  reader.read("decay_mult", key.decay_mult, "", kNotNegative);
  registry::optimizers().read(type, reader);
  for (const auto& [name, value] : reader.values())
    if (node.find(name) != nullptr && name != "lr_mult" && name != "decay_mult")
      key.options[name] = value;
  return key;
}

void read_custom_keys(OptionReader& keys, const OptimizerPlan& optimizer,
                      ParamwiseOptions& paramwise) {
  const ConfigNode* node =
      keys.take("custom_keys", "a map of name parts, each with lr_mult, decay_mult or options",
                "settings of parameters whose names contain the key; the longest key wins");
  if (node == nullptr || node->kind == Kind::Null) return;
  const std::vector<std::string> path{keys.full("custom_keys")};
  OptionReader each(node, path, keys.where());
  for (const auto& name : each.unread()) {
    const OptionReader inner = each.map(name);
    auto inner_path = path;
    inner_path.push_back(name);
    paramwise.custom_keys[name] =
        inner.node() == nullptr
            ? ParamwiseCustomKey{}
            : read_custom_key(*inner.node(), optimizer.type, optimizer.options, inner_path);
  }
}

void read_paramwise(OptionReader& keys, const OptimizerPlan& optimizer,
                    ParamwiseOptions& paramwise) {
  read_custom_keys(keys, optimizer, paramwise);
  keys.read("bias_lr_mult", paramwise.bias_lr_mult,
            "factor of lr for biases, except those of normalisations", kNotNegative);
  keys.read("bias_decay_mult", paramwise.bias_decay_mult, "factor of weight decay for biases",
            kNotNegative);
  keys.read("norm_decay_mult", paramwise.norm_decay_mult,
            "factor of weight decay for normalisations", kNotNegative);
  keys.read("flat_decay_mult", paramwise.flat_decay_mult,
            "factor of weight decay for parameters of one dimension", kNotNegative);
  keys.read("dwconv_decay_mult", paramwise.dwconv_decay_mult,
            "factor of weight decay for depth-wise convolutions", kNotNegative);
  keys.read("bypass_duplicate", paramwise.bypass_duplicate,
            "accept tensors with several names, under the first; false: an error");
  keys.finish();
}

void read_init(OptionReader& keys, OptimizerInit& init) {
  keys.read_path("init", init.path,
                 "a file of torch.save with the state_dict() of an optimizer of Python's "
                 "torch.optim, from which the optimizer goes on; its options stay those of the "
                 "config");
  keys.read("init_key", init.key,
            "the dict with the state in a file of torch.save that has several; keys within keys "
            "are divided by /");
}

bool is_option(const std::string& key) {
  return key != "type" && key != "init" && key != "init_key";
}

}  // namespace

void describe_optimizer(OptionReader& keys) {
  OptimizerInit init;
  read_init(keys, init);
  OptionReader paramwise_keys = keys.map("paramwise");
  ParamwiseOptions paramwise;
  read_paramwise(paramwise_keys, OptimizerPlan{}, paramwise);
  keys.finish();
}

void read_optimizer(OptionReader& keys, ModelSections& own) {
  const ParallelConfig& parallel = own.parallel;
  OptimizerPlan& optimizer = own.optimizer;
  const OptimizerRegistry& registry = registry::optimizers();
  optimizer.type = parallel.plan.optimizer_type;
  if (optimizer.type.empty()) keys.require("type", "the name of an optimizer");
  keys.read_choice("type", optimizer.type, registry.names(), "the optimizer");
  if (optimizer.type.empty()) {
    keys.accept_rest();  // only the missing type is reported: its options are unknown
    return keys.finish();
  }
  if (!parallel.plan.optimizer_type.empty() && optimizer.type != parallel.plan.optimizer_type)
    keys.fail("type", optimizer.type + ", and parallel.optimizer_type is " +
                          parallel.plan.optimizer_type + "; expected one of the two");
  if (optimizer.type == "LBFGS")
    keys.fail(
        "type",
        "LBFGS evaluates the loss several times per step, but the trainer does once; expected "
        "another optimizer");
  read_init(keys, own.optimizer_init);
  OptionReader paramwise = keys.map("paramwise");
  registry.read(optimizer.type, keys);
  for (const auto& [name, value] : keys.values())
    if (is_option(name) && keys.given(name)) optimizer.options[name] = value;
  read_paramwise(paramwise, optimizer, optimizer.paramwise);
}

}  // namespace tessera::train
