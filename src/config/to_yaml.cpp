#include <yaml-cpp/emitter.h>

#include "tessera/config/config_node.h"

namespace tessera {
namespace {

void emit(YAML::Emitter& out, const ConfigNode& node) {
  switch (node.kind) {
    case ConfigNode::Kind::Null:
      out << YAML::Null;
      return;
    case ConfigNode::Kind::Scalar:
      if (node.quoted) out << YAML::DoubleQuoted;
      out << node.text;
      return;
    case ConfigNode::Kind::Sequence:
      out << YAML::Flow << YAML::BeginSeq;
      for (const auto& item : node.items) emit(out, item);
      out << YAML::EndSeq;
      return;
    case ConfigNode::Kind::Map:
      out << YAML::BeginMap;
      for (const auto& [key, value] : node.members) {
        out << YAML::Key << key << YAML::Value;
        emit(out, value);
      }
      out << YAML::EndMap;
  }
}

}  // namespace

std::string to_yaml(const ConfigNode& root) {
  YAML::Emitter out;
  emit(out, root);
  return std::string(out.c_str()) + "\n";
}

}  // namespace tessera
