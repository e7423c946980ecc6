#include "checkpoint/weights/key_map.h"

#include "checkpoint/io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera {

KeyMap::KeyMap(const std::vector<NameRule>& rules) {
  for (const auto& rule : rules) {
    try {
      rules_.emplace_back(std::regex(rule.pattern), rule.replacement);
    } catch (const std::regex_error& error) {
      throw UsageError("key_map: pattern " + safetensors::in_quotes(rule.pattern) +
                       " is no regular expression: " + error.what());
    }
  }
}

std::string KeyMap::operator()(std::string name) const {
  // The matcher of the C++ library recurses for each character.
  constexpr size_t kMaxName = 4096;
  if (!rules_.empty() && name.size() > kMaxName)
    throw UsageError("key_map: the name " + safetensors::in_quotes(name) + " has " +
                     std::to_string(name.size()) + " bytes; expected at most 4096");
  for (const auto& [pattern, replacement] : rules_)
    name = std::regex_replace(name, pattern, replacement);
  return name;
}

void check_key_map(const std::vector<NameRule>& rules) { KeyMap{rules}; }

}  // namespace tessera
