#include "tessera/config/config_node.h"

#include <algorithm>
#include <utility>

#include "tessera/error.h"

namespace tessera {

ConfigNode ConfigNode::scalar(std::string text, bool quoted) {
  ConfigNode node;
  node.kind = Kind::Scalar;
  node.text = std::move(text);
  node.quoted = quoted;
  return node;
}

bool ConfigNode::operator==(const ConfigNode& other) const {
  return kind == other.kind && text == other.text && quoted == other.quoted &&
         items == other.items && members == other.members;
}

const ConfigNode* ConfigNode::find(const std::string& key) const {
  for (const auto& member : members)
    if (member.key == key) return &member.value;
  return nullptr;
}

ConfigNode* ConfigNode::find(const std::string& key) {
  return const_cast<ConfigNode*>(std::as_const(*this).find(key));
}

int64_t ConfigNode::node_count() const {
  int64_t count = 1;
  for (const auto& item : items) count += item.node_count();
  for (const auto& member : members) count += member.value.node_count();
  return count;
}

std::string ConfigNode::describe() const {
  switch (kind) {
    case Kind::Null:
      return "nothing";
    case Kind::Sequence:
      return "a list of " + std::to_string(items.size());
    case Kind::Map:
      return "a map";
    case Kind::Scalar:
      break;
  }
  constexpr size_t kShown = 80;
  std::string shown = text;
  if (shown.size() > kShown) {
    shown.resize(kShown);
    shown.append("...");
  }
  return quoted ? "the string \"" + shown + "\"" : shown;
}

}  // namespace tessera
