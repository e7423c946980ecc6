#include "train/config_tree.h"

#include <algorithm>
#include <utility>

#include "tessera/error.h"

namespace tessera::train {

const ConfigNode* ConfigNode::find(const std::string& key) const {
  for (const auto& member : members) {
    if (member.key == key) {
      return &member.value;
    }
  }
  return nullptr;
}

ConfigNode* ConfigNode::find(const std::string& key) { return const_cast<ConfigNode*>(std::as_const(*this).find(key)); }

int64_t ConfigNode::node_count() const {
  int64_t count = 1;
  for (const auto& item : items) {
    count += item.node_count();
  }
  for (const auto& member : members) {
    count += member.value.node_count();
  }
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

void apply_override(ConfigNode& root, const std::string& assignment) {
  const std::string label = "command line";
  const size_t equals = assignment.find('=');
  const std::string key = assignment.substr(0, equals);
  if (equals == std::string::npos || key.empty()) {
    throw UsageError(label + ": \"" + assignment.substr(0, 80) + "\": expected key=value, as in optimizer.lr=3e-4");
  }
  ConfigNode value;
  try {
    value = parse_yaml(assignment.substr(equals + 1), label, false);
  } catch (const UsageError& error) {
    throw UsageError(std::string(error.what()) + ", in \"" + assignment.substr(0, 80) + "\"");
  }
  value.where = label;

  ConfigNode* node = &root;
  int depth = 0;
  for (size_t begin = 0; begin <= key.size(); ++depth) {
    const size_t end = std::min(key.find('.', begin), key.size());
    const std::string part = key.substr(begin, end - begin);
    if (part.empty() || depth >= kMaxConfigDepth) {
      throw UsageError(label + ": \"" + key.substr(0, 80) + "\": expected names joined by dots, as in optimizer.lr");
    }
    if (node->kind == ConfigNode::Kind::Null) {
      node->kind = ConfigNode::Kind::Map;
    }
    if (node->kind != ConfigNode::Kind::Map) {
      throw UsageError(label + ": " + key + ": " + key.substr(0, begin - 1) + " is " + node->describe() +
                       " and has no keys");
    }
    ConfigNode* next = node->find(part);
    if (next == nullptr) {
      node->members.push_back({part, ConfigNode{}});
      next = &node->members.back().value;
      next->where = label;
    }
    node = next;
    begin = end + 1;
  }
  *node = std::move(value);
}

}  // namespace tessera::train
