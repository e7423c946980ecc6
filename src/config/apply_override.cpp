#include <algorithm>
#include <charconv>
#include <string>

#include "tessera/config/config_node.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// The item of a list at the index `part`.
ConfigNode& item_of(ConfigNode& list, const std::string& part, const std::string& label,
                    const std::string& key) {
  size_t index = 0;
  const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), index);
  if (error != std::errc() || stop != part.data() + part.size() || index >= list.items.size()) {
    const auto size = std::to_string(list.items.size());
    throw UsageError(label + ": " + key + ": \"" + part + "\" in a list of " + size +
                     "; expected an index below " + size + ", counted from 0");
  }
  return list.items[index];
}

ConfigNode& member_of(ConfigNode& map, const std::string& part, const std::string& label) {
  if (ConfigNode* found = map.find(part)) return *found;
  map.members.push_back({part, ConfigNode{}});
  map.members.back().value.where = label;
  return map.members.back().value;
}

}  // namespace

void apply_override(ConfigNode& root, const std::string& assignment) {
  const std::string label = "command line";
  const size_t equals = assignment.find('=');
  const std::string key = assignment.substr(0, equals);
  if (equals == std::string::npos || key.empty()) {
    throw UsageError(label + ": \"" + assignment.substr(0, 80) +
                     "\": expected key=value, as in optimizer.lr=3e-4");
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
      throw UsageError(label + ": \"" + key.substr(0, 80) +
                       "\": expected names joined by dots, as in optimizer.lr");
    }
    if (node->kind == ConfigNode::Kind::Null) node->kind = ConfigNode::Kind::Map;
    if (node->kind == ConfigNode::Kind::Sequence) {
      node = &item_of(*node, part, label, key);
    } else if (node->kind == ConfigNode::Kind::Map) {
      node = &member_of(*node, part, label);
    } else {
      throw UsageError(label + ": " + key + ": " + key.substr(0, begin - 1) + " is " +
                       node->describe() + " and has no keys");
    }
    begin = end + 1;
  }
  *node = std::move(value);
}

}  // namespace tessera
