#include <cstdlib>
#include <string>

#include "tessera/config/config_node.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kStart = "${env:";

std::string expanded(const ConfigNode& node) {
  const std::string& text = node.text;
  std::string result;
  size_t at = 0;
  for (size_t start; (start = text.find(kStart, at)) != std::string::npos;) {
    const size_t end = text.find('}', start);
    if (end == std::string::npos) {
      throw UsageError(node.where + ": " + node.describe() +
                       ": expected ${env:NAME} or ${env:NAME:-default}");
    }
    const std::string inside = text.substr(start + 6, end - start - 6);
    const size_t colon = inside.find(":-");
    const std::string name = inside.substr(0, colon);
    const char* value = std::getenv(name.c_str());
    if (value == nullptr && colon == std::string::npos) {
      throw UsageError(node.where + ": environment variable " + name +
                       " is not set; expected it, or a default as in ${env:" + name + ":-value}");
    }
    result += text.substr(at, start - at) + (value != nullptr ? value : inside.substr(colon + 2));
    at = end + 1;
  }
  return result + text.substr(at);
}

}  // namespace

void expand_environment(ConfigNode& root) {
  if (root.kind == ConfigNode::Kind::Scalar && root.text.find(kStart) != std::string::npos)
    root.text = expanded(root);
  for (auto& item : root.items) expand_environment(item);
  for (auto& member : root.members) expand_environment(member.value);
}

}  // namespace tessera
