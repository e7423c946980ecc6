#include "tessera/config/option_map.h"

#include "config/scalar_values.h"

namespace tessera {
namespace {

std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(int64_t value) { return std::to_string(value); }
std::string text_of(double value) { return config::exact_text(value); }
std::string text_of(const std::string& value) { return '"' + value + '"'; }

template <class Value>
std::string text_of(const std::vector<Value>& values) {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "[" : ", ") + text_of(value);
  return text.empty() ? "[]" : text + "]";
}

ConfigNode node_of(bool value) { return ConfigNode::scalar(text_of(value)); }
ConfigNode node_of(int64_t value) { return ConfigNode::scalar(text_of(value)); }
ConfigNode node_of(double value) { return ConfigNode::scalar(text_of(value)); }
ConfigNode node_of(const std::string& value) { return ConfigNode::scalar(value, true); }

template <class Value>
ConfigNode node_of(const std::vector<Value>& values) {
  ConfigNode node;
  node.kind = ConfigNode::Kind::Sequence;
  for (const auto& value : values) node.items.push_back(node_of(value));
  return node;
}

}  // namespace

std::string to_string(const OptionValue& value) {
  return std::visit([](const auto& v) { return text_of(v); }, value);
}

ConfigNode options_node(const OptionMap& options, const std::string& where) {
  ConfigNode root;
  root.kind = ConfigNode::Kind::Map;
  root.where = where;
  for (const auto& [name, value] : options) {
    ConfigNode node = std::visit([](const auto& v) { return node_of(v); }, value);
    node.where = where;
    for (auto& item : node.items) item.where = where;
    root.members.push_back({name, std::move(node)});
  }
  return root;
}

}  // namespace tessera
