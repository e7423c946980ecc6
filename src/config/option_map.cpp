#include "tessera/config/option_map.h"

#include "config/scalar_values.h"

namespace tessera {
namespace {

constexpr auto kNodeOf = [](const auto& value) { return config::node_of(value); };

std::string text_of(const ConfigNode& node) {
  std::vector<std::string> items;
  for (const auto& item : node.items) items.push_back(text_of(item));
  if (node.kind == ConfigNode::Kind::Sequence) return "[" + config::joined(items, ", ") + "]";
  return node.quoted ? '"' + node.text + '"' : node.text;
}

}  // namespace

std::string to_string(const OptionValue& value) { return text_of(std::visit(kNodeOf, value)); }

ConfigNode options_node(const OptionMap& options, const std::string& where) {
  ConfigNode root;
  root.kind = ConfigNode::Kind::Map;
  root.where = where;
  for (const auto& [name, value] : options) {
    ConfigNode node = std::visit(kNodeOf, value);
    node.where = where;
    for (auto& item : node.items) item.where = where;
    root.members.push_back({name, std::move(node)});
  }
  return root;
}

}  // namespace tessera
